"""Recordings and synthetic scenes through the same engine, with numbers and pictures."""
