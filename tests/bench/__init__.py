"""What is measured side by side, never part of the pass/fail run: see README.md."""
