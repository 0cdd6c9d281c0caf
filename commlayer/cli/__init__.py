"""The command line, one module for each command. ``commlayer.cli.main`` imports a command's module when it is called."""
