"""CURVE RPC between our own programs: named methods, msgpack parameters, raw buffers beside them.

    server = RpcServer(env.listen["rpc"], {"sum": on_sum}, env.run_dir, env.attempt)
    await server.serve()     # async def on_sum(params, frames): return value, or: return value, [buffer, ...]

    client = RpcClient(lambda: address_or_none, env.run_dir, env.attempt)
    value = await client.call("sum", {"a": 1}, timeout_s=10)
    value, frames = await client.call_frames("sum", {"a": 1}, frames=[array], timeout_s=10)

`SyncRpcClient` and `RpcThreadServer` are the same for threads. What holds for repeats and restarts: rpc_protocol.py.
"""

from miles_hpc.wire.rpc_client import RpcClient, SyncRpcClient
from miles_hpc.wire.rpc_protocol import RpcError, RpcRemoteError, RpcTimeout, RpcUnknownOutcome, RpcUnreachable
from miles_hpc.wire.rpc_server import Handler, PlainHandler, RpcServer, RpcThreadServer

__all__ = [
    "Handler",
    "PlainHandler",
    "RpcClient",
    "RpcError",
    "RpcRemoteError",
    "RpcServer",
    "RpcThreadServer",
    "RpcTimeout",
    "RpcUnknownOutcome",
    "RpcUnreachable",
    "SyncRpcClient",
]
