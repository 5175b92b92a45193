"""What the fault cases are made of: processes that can be hurt, a sink that fences, and a judge."""
