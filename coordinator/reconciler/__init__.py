"""Level-triggered repair: one pass per module."""
