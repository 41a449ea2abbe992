"""The only cloud SDK and the only SSH: where nodes come from and how they are taken away."""
