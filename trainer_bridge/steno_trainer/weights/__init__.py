"""New weights on their way to the workers, seen from the trainer (I10).

source      a model's weights under their checkpoint's names, gathered from ZeRO-3 bucket by bucket
adapters    an adapter of them, merged or alone
files       what is written of them: shards, full copies, differences
transports, stream, nccl    how workers get at them
publisher   posts an update, follows it while training goes on (`follow`), names workers that failed
probe       what the trainer's own weights say of a few tokens
"""
