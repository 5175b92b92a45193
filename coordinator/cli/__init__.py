"""The commands of the console script that need the server's packages."""
