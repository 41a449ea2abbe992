"""Of what a user does with a controller, below the commands."""
