"""A recorder in front of an engine: each conversation of any client is an episode in a run folder of its own.

record           the command: folder, engine, server, the program that it may start
recorder         which conversation a request belongs to; conversations begin, sleep, go on and end
recorded_env     one conversation as an environment, whose actions are the answers
client_sampling  an answer sampled as its client asks for it
"""
