"""Tables and cards that are made from benchmark records."""
