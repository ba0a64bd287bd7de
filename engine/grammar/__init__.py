"""What a completion may be: schemas, regexes, choices and grammars, as llguidance reads them."""
