"""The commands of `memrl`: options, checks of what the user gave, and what is printed; the work is done by the other packages."""
