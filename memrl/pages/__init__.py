"""Web pages of one file without scripts, on which one sees what an agent remembered."""
