"""Tables and cards made from benchmark records."""
