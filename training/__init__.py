"""How the demo models were trained. Not part of the installed package."""
