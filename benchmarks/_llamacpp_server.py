"""llama.cpp's server with one thread: prints its address, and ends with its standard input. Knows nothing of agentrl.

Run by `.venv-peers/bin/python` (`make peers` makes it):
`_llamacpp_server.py MODEL.gguf AT_ONCE CONTEXT`
"""

import os
import sys

import xllamacpp

model, at_once, context = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
params = xllamacpp.CommonParams()
params.model.path = model
params.n_parallel, params.n_ctx = at_once, at_once * context
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
params.port, params.n_threads_http = 0, 2
params.fit_params, params.warmup, params.cache_prompt, params.cache_ram_mib = False, True, False, 0
server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
sys.stdin.read()
os._exit(0)
