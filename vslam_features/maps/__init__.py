"""The map: keyframes of this run, and later of earlier ones."""
