"""The pytest plugin of commlayer."""
