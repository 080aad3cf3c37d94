"""Configuration, errors, files and machine facts shared by every other package."""
