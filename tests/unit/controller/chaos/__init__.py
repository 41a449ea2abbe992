"""Of `varuna chaos`."""
