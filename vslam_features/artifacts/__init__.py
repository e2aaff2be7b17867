"""Model files: what they are, where they come from, what they carry."""
