"""Maps in the formats of others: COLMAP, hloc, tinynav."""
