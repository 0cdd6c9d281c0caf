"""``python -m commlayer``: the command line, where its script is not on the path."""

from commlayer.cli.main import main

if __name__ == "__main__":
    main()
