"""`rootward plan`: will speculation pay for this target and this draft on this machine?

measurement  services of the pair under load: plain decoding, speculation, and trees of fixed sizes, in turn
forecast     speed-up by temperature, load and distance, and what would improve it
report       tables, plot and JSON
"""
