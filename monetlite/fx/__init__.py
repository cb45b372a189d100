"""Reading a captured joint graph: which storages its tensors live in, and its calls as data."""
