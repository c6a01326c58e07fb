"""What proxy, worker, trainer and clients exchange: records, REST bodies, frames, errors. No I/O."""
