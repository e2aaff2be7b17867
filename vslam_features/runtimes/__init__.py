"""Runtimes that execute model files. Each imports its library only where it is used."""
