"""`rootward plan`: will speculation pay for this target and this draft on this machine?

flags        the command line
measurement  rounds of both models on prompts, timed in this process by the parts that serve them
forecast     what the speculation controller of the service makes of these figures, by temperature, load and distance
report       tables, plot and JSON
"""
