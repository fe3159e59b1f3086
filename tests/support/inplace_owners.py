"""Owners of what the library changes in place, where `tests.support.inplace` cannot prove them.

By file, and by function and operation. Each operand is one of these:

- fresh: allocated by this function, or for it alone, in a way that its text does not prove;
- given: an argument that a docstring, or a name that ends in `_`, lets the function overwrite;
- state: a parameter, optimizer state, buffer or sum, which this very function is there to update;
- read: not written, in spite of the name;
- host: a number or a container of the host, no tensor.
"""

from __future__ import annotations

KINDS = ("fresh", "given", "state", "read", "host")

OWNERS: dict[str, dict[str, str]] = {
    "nxtrain/tools/trace/step_trace.py": {
        "_Gathering.__call__: dist.all_gather_into_tensor(output_tensor)": "given: by FSDP2, for the result",
        "_Reduction.__call__: dist.reduce_scatter_tensor(output_tensor)": "given: likewise",
    },
    "nxtrain/checkpoint/async_writer.py": {
        "CheckpointWriter._full_host: needed[host] +=": "host: dictionary",
        "CheckpointWriter._full_host: free[host] =": "host: dictionary",
    },
    "nxtrain/cli/launch.py": {"launch: launch_on(out=out)": "host: a folder"},
    "nxtrain/tools/doctor/collectives_rank.py": {
        "_measure: backend.collectives.all_reduce(x)": "fresh: `torch.zeros` right above, or the sum before",
    },
    "nxtrain/data/arrow/inspection.py": {
        "Lengths.add: self._counts[:found.size] +=": "host: the histogram that this very method counts",
        "PackingWaste.add: self._rests +=": "host: the histogram that this very method counts",
        "_of_sources.documents: skipped[row.reason] +=": "host: dictionary",
        "verify_corpus.add: done +=": "host: number",
    },
    "nxtrain/common/io/cached_object.py": {
        "CachedObject._find: self._is_here[block] =": "host: the blocks that this very object has found",
        "CachedObject._store: self._is_here[number:number + len(blocks)] =": "host: likewise",
    },
    "nxtrain/data/arrow/lanes.py": {
        "MixedLane.row: self._given +=": "host: number",
    },
    "nxtrain/data/arrow/prepared.py": {
        "_Bodiless.read: found.ctypes.data": "fresh: bytes of this read, whose address is noted",
        "_Bodiless.read: self._position +=": "host: number",
    },
    "nxtrain/data/arrow/streams.py": {
        "BestFitLane._fill: flat[begin:begin + length] =": "fresh: a view of `np.full` right above",
        "BestFitLane._fill: flat[begin + length - 1] |=": "fresh: likewise",
    },
    "nxtrain/data/arrow/training.py": {
        "_append_held_out: marked[-1] |=": "fresh: `astype` right above copies",
    },
    "nxtrain/tools/eval/scorer.py": {
        "Scorer._totals: left[owner] -=": "host: list of this very function",
    },
    "nxtrain/backends/cpu_products.py": {
        "wide_matmul: part.copy_": "fresh: a part of `new_empty` above",
    },
    "nxtrain/common/distributed/heartbeats.py": {
        "HeartbeatStore.answers: found[rank] =": "host: dictionary",
    },
    "nxtrain/backends/cpu_native/shared_memory.py": {
        "SharedMemoryCollectives.start_all_reduce: super().start_all_reduce(x)": (
            "given: `Collectives.all_reduce` may overwrite its input"
        ),
    },
    "nxtrain/common/distributed/c10d_collectives.py": {
        "_Async.wait: self.result.mul_": "fresh: made by the collective, which alone scales",
        "_Traced.wait: self.into.copy_": "given: `Collectives.all_reduce` may overwrite its input",
        "C10dCollectives.start_all_reduce: _FUNCTIONAL.all_reduce(x)": "read: the functional form",
        "C10dCollectives.start_all_reduce: dist.all_reduce(x)": (
            "given: `Collectives.all_reduce` may overwrite its input"
        ),
        "C10dCollectives.start_all_gather: _FUNCTIONAL.all_gather_into_tensor(x)": "read: the functional form",
        "C10dCollectives.start_reduce_scatter: _FUNCTIONAL.reduce_scatter_tensor(x)": "read: the functional form",
        "C10dCollectives.start_reduce_scatter: dist.reduce_scatter_tensor(out)": (
            "fresh: `new_empty` right above; the other `out` is that of the functional form"
        ),
        "C10dCollectives._start_sum: dist.all_reduce(flat)": "fresh: the bucket that its caller has just allocated",
        "C10dCollectives._pack: part.view(tensor.shape).copy_": "fresh: a part of the bucket that was just allocated",
    },
    "nxtrain/common/distributed/collectives.py": {
        "Collectives.all_reduce: self.start_all_reduce(x)": "given: `Collectives.all_reduce` may overwrite its input",
    },
    "nxtrain/backends/cpu_kernels.py": {
        "CpuKernels._update: x[-left_over:] =": (
            "given: `Kernels.adamw` updates these in place, and may overwrite gradients"
        ),
    },
    "nxtrain/backends/cpu_attention.py": {
        "_BlockedAttention.forward: view.copy_": "fresh: a view of `out`, saved for backward only when it is whole",
        "_BlockedAttention.backward: view.copy_": "fresh: a view of `q_grad`",
    },
    "nxtrain/backends/cuda.py": {
        "CudaKernels.tiles: room -=": "host: number",
    },
    "nxtrain/backends/torch_kernels.py": {
        "cross_entropy: scores.sub_(peak.unsqueeze(1)).exp_": (
            "given: the logits, which the docstring lets it overwrite"
        ),
        "cross_entropy: scores.sub_": "given: the logits, which the docstring lets it overwrite",
        "cross_entropy: exp.mul_": "given: the logits, which the docstring lets it overwrite",
        "cross_entropy: grad.scatter_add_": "given: the logits, which the docstring lets it overwrite",
        "FusedKernels.adamw: torch._fused_adamw_(list(params))": (
            "given: `Kernels.adamw` updates all in place but gradients, which it may overwrite"
        ),
        "FusedKernels.replace: torch.where(out=x)": "given: `Kernels.replace` gives it new values",
        "PlainKernels.adamw: x.copy_": "given: `Kernels.adamw` updates parameters and means in place",
        "PlainKernels.replace: x.copy_": "given: `Kernels.replace` gives it new values",
    },
    "nxtrain/backends/neuron/backend.py": {
        "NeuronKernels.stochastic_round: out.copy_": "given: `Kernels.stochastic_round` writes it",
    },
    "nxtrain/backends/neuron/mesh_collectives.py": {
        "MeshCollectives.lay_out: self._groups[axis.groups] =": "host: dictionary",
    },
    "nxtrain/backends/neuron/native_kernels.py": {
        "NeuronNativeKernels.stochastic_round: out.copy_": "given: `Kernels.stochastic_round` writes it",
    },
    "nxtrain/backends/neuron/native_rounding.py": {
        "round_in_graph: out.copy_": "given: `Kernels.stochastic_round` writes it",
        "round_on_host: out.copy_": "given: `Kernels.stochastic_round` writes it",
    },
    "nxtrain/backends/neuron/nxd/pretended.py": {
        "_pretend_platform: names['get_platform_target'] =": "host: names of NxD's module",
    },
    "nxtrain/backends/neuron/nxd/binding.py": {
        "NxdBinding.start_average: bucket_allreduce_gradients(fresh)": "fresh: copies of this function (`copy=True`)",
    },
    "nxtrain/backends/rounding.py": {
        "mix_: _mix_hashes_(_fold_(x))": "given: the name ends in `_`",
        "mix_: _fold_(x)": "given: the name ends in `_`",
        "_mix_hashes_: x *=": "given: the name ends in `_`",
        "_mix_hashes_: x ^=": "given: the name ends in `_`",
        "_fold_: x ^=": "given: the name ends in `_`",
        "_round_by_pairs_: bits +=": "given: the name ends in `_`; a view of `x`",
        "_round_by_pairs_: bits &=": "given: the name ends in `_`; a view of `x`",
        "round_by_pairs: out.copy_": "given: `Kernels.stochastic_round` writes it",
        "round_by_pairs_on_host: out.copy_": "given: `Kernels.stochastic_round` writes it",
        "round_by_pairs_on_host: _round_by_pairs_(x)": "given: `Kernels.stochastic_round` may overwrite it",
        "round_one_by_one: out.copy_": "given: `Kernels.stochastic_round` writes it",
    },
    "nxtrain/backends/xla/tracing.py": {
        "_told_reads.read_into: out.fill_": "given: torch's own buffer for what it reads from the device",
    },
    "nxtrain/backends/xla/backend.py": {
        "XlaCollectives.start_all_reduce: x.copy_": "given: `Collectives.all_reduce` may overwrite its input",
        "XlaCollectives._reduced: self._xm.all_reduce(fresh)": "fresh: clones of this function",
    },
    "nxtrain/tools/bench/checkpoint.py": {
        "FilledState.copy: self._into[key].copy_": "state: buffer of this object",
        "FilledState.torch_load: self._into[key].copy_": "state: buffer of this object",
    },
    "nxtrain/tools/bench/data_peers.py": {
        "_titan: DATASETS['nxtrain'] =": "host: dictionary of torchtitan",
        "ids_sides: streaming.MDSWriter(out=local)": "host: name of a folder",
    },
    "nxtrain/tools/bench/lazy.py": {
        "peer.step: torch.nn.utils.clip_grad_norm_(model.parameters())": (
            "state: gradients of the model that this benchmark trains"
        ),
    },
    "nxtrain/tools/bench/collectives_rank.py": {
        "_operation.<lambda>: comm.all_reduce(whole)": "state: buffer of this benchmark",
        "_operation.<lambda>: spare.copy_": "state: buffer of this benchmark",
    },
    "nxtrain/tools/bench/titan.py": {
        "titan_step.step: nn.utils.clip_grad_norm_(model.parameters())": (
            "state: gradients of the model that this benchmark trains"
        ),
    },
    "nxtrain/tools/bench/pipeline_rank.py": {
        "step.Counted.start_send: sent_bytes +=": "host: number",
    },
    "nxtrain/tools/bench/peers.py": {
        "transformers_step.step: torch.nn.utils.clip_grad_norm_(model.parameters())": (
            "state: gradients of the model that this benchmark trains"
        ),
    },
    "nxtrain/common/io/checksummed_file.py": {
        "ChecksummedWriter.write: rest.data": "read: bytes that are sent",
        "ChecksummedWriter.write: np.frombuffer(self._block, np.uint8)[self._filled:self._filled + len(part)] =": (
            "state: buffer of this object"
        ),
    },
    "nxtrain/checkpoint/shards.py": {
        "owned: total[chunk.copies] +=": "host: number",
        "owned: before[chunk.copies] +=": "host: number",
    },
    "nxtrain/checkpoint/convert/hf_folder.py": {
        "HfWeights.__call__: view.copy_": "state: parameter under construction, which `materialize` fills",
    },
    "nxtrain/checkpoint/load.py": {
        "load: filled[chunk.kind, chunk.parameter] +=": "host: number",
        "load: local.copy_": "state: parameter or optimizer state that is loaded",
    },
    "nxtrain/checkpoint/manifest.py": {
        "header: text +=": "host: bytes",
    },
    "nxtrain/checkpoint/convert/nxd_weights.py": {
        "NxdWeights._place: target.copy_": "state: part of the tensor that this reader is putting together",
    },
    "nxtrain/checkpoint/convert/nxd_write.py": {
        "_Writer.write_weights: tensors[HEAD] =": "host: dictionary",
        "_Writer._read: target.copy_": "state: part of the buffers that this reader allocated",
    },
    "nxtrain/checkpoint/dcp_planner.py": {
        "ChunkLoadPlanner.finish_plan: tensor.zero_": "state: padding of what is loaded",
    },
    "nxtrain/checkpoint/convert/streamed.py": {
        "batches: free -=": "host: number",
        "_header: text +=": "host: bytes",
    },
    "nxtrain/checkpoint/dcp_storage.py": {
        "Staging.fill: buffer.copy_": "state: buffer of this object",
        "FileWriter._write: high +=": "host: number",
        "FileReader.read_data: wanted[file] +=": "host: list",
        "_Piece.take: self._into[low - self.start:high - self.start] =": (
            "state: bytes of what is loaded, or of a buffer of this object"
        ),
        "_Piece.take: self.target.copy_": "state: parameter or optimizer state that is loaded",
        "bytes_of: tensor.detach().reshape(-1).view(torch.uint8).numpy().data": (
            "read: bytes for a file; `_Piece.take` writes those of what is loaded"
        ),
    },
    "nxtrain/data/checksums.py": {
        "VerifiedBlocks.fill: view[done:done + len(part)] =": "given: the view that the docstring lets it fill",
    },
    "nxtrain/data/files.py": {
        "writing_tokens.append: num_tokens +=": "host: number",
        "writing_tokens.append: np.ascontiguousarray(ids.astype(dtype, copy=False)).data": "read: bytes for a file",
    },
    "nxtrain/data/held_out.py": {
        "target_counts: found[:counts.size] +=": "fresh: counts of this round",
    },
    "nxtrain/data/mixture.py": {
        "Mixture._tables: counts[chosen] +=": "fresh: list of this function",
    },
    "nxtrain/data/order.py": {
        "shuffled: rows[outside] =": "fresh: a result of `_permute`",
    },
    "nxtrain/data/samples.py": {
        "FileSamples._rows: content[number].data": "fresh: rows of this function, into which a file is read",
        "check_table: chunk.data": "read: bytes for a digest",
    },
    "nxtrain/launch/torchrun.py": {
        "Agent._start_workers: Agent.starts +=": "host: number",
        "Agent._count_restart: self._worker_group.spec.max_restarts +=": "host: number",
        "Agent._monitor_workers: worker_group.spec.max_restarts +=": "host: number",
    },
    "nxtrain/checkpoint/convert/hf.py": {"write_merged.read: target.copy_": "given: `write_streamed` has it filled"},
    "nxtrain/checkpoint/convert/peft.py": {
        "AdapterWeights.__call__: view.copy_": "given: parameter under construction, whose docstring says fill",
    },
    "nxtrain/nn/quantized.py": {
        "filling.fill_one: local.copy_": "given: parameter under construction, as of every `Fill`",
    },
    "nxtrain/nn/lora.py": {
        "adapt: model.requires_grad_": "given: the model, whose docstring says changed in place",
        "_adapt_layer: layer.specs[leaf] =": "host: dictionary",
        "_require_gradient: inputs[0].requires_grad_": "read: autograd's mark alone changes",
    },
    "nxtrain/train/adapters.py": {
        "save_adapter: whole[tuple((slice(start, start + size) for start, size in box))].copy_": (
            "fresh: `torch.zeros` right above"
        ),
    },
    "nxtrain/nn/decoding.py": {
        "Decoder._compute: self._capacity *=": "host: number",
        "_Cache.add: kept.scatter_": "state: keys and values of this object, made by `new_zeros` or `F.pad`",
    },
    "nxtrain/nn/init.py": {
        "draw_shard: view.fill_": "state: parameter under construction, whose docstring says in place",
        "_draw: torch.from_numpy(_DRAWS[init.kind](bits, extent)).mul_": "fresh: numbers drawn here",
        "_draw: view[tuple(into)].copy_": "state: parameter under construction, whose docstring says fill",
    },
    "nxtrain/optim/adamw.py": {
        "AdamW.reset: master.copy_": "state: optimizer state, which begins anew",
        "AdamW.reset: lost.zero_": "state: optimizer state, which begins anew",
        "AdamW.step: self.num_updates.add_": "state: optimizer state: the number of updates",
    },
    "nxtrain/optim/update_rules.py": {
        "Copied.close: self.value.copy_": "state: parameter, which this rule updates",
        "Nearest.close: self.value.copy_": "state: parameter or running mean, which this rule updates",
        "Stochastic.close: self.round_(wide)": "given: `ParamStorage.close` may overwrite what `open` gave",
        "Compensated.close: self.value.copy_": "state: parameter, which this rule updates",
        "Compensated.close: self.lost.copy_": "state: optimizer state, which this rule updates",
        "Compensated.close: wide.sub_": "given: `ParamStorage.close` may overwrite what `open` gave, here a sum",
        "Compensated.close: torch.sub(out=narrow)": "fresh: a bfloat16 copy of float32",
        "Elsewhere.close: self._value.copy_": "state: parameter, which this rule updates",
    },
    "nxtrain/optim/loss_scale.py": {
        "LossScale.update: self.state.copy_": "state: the scale itself",
        "LossScale.restore: self.state.copy_": "state: the scale itself, which is loaded",
    },
    "nxtrain/nn/offload.py": {
        "saved_on_host.pack: copies[key] =": "host: dictionary",
    },
    "nxtrain/parallel/data_parallel.py": {
        "Bucketed._hook.finished: self.sums[name].add_": "state: gradient sum of this object",
        "Bucketed._take: self.sums[name].zero_": "state: gradient sum of this object",
        "Zero1.publish: parameter.copy_": "state: parameter, which gets its new values",
    },
    "nxtrain/parallel/grads.py": {
        "Gradients.norm: self._comm.all_reduce(self.square_sum.of(tensors))": "fresh: a sum",
        "Gradients.count: self._comm.all_reduce(self.square_sum(marks))": "fresh: a sum",
        "_TensorParallelSums.__init__: self._rows.setdefault(count, {})[name] =": "host: dictionary",
    },
    "nxtrain/parallel/saved_tensors.py": {
        "save_copies_of_views.pack: kept[id(x)] =": "host: dictionary",
        "save_copies_of_views.pack: saved.data": "read: what backward reads",
    },
    "nxtrain/parallel/loss.py": {
        "_VocabCrossEntropy.forward: weight_grad.float().add_": (
            "fresh: a product of this function, which is saved when it is whole"
        ),
        "_VocabCrossEntropy.backward: hidden_grad.mul_": (
            "fresh: made and saved by forward; a second backward pass is refused"
        ),
        "_VocabCrossEntropy.backward: weight_grad.mul_": (
            "fresh: made and saved by forward; a second backward pass is refused"
        ),
    },
    "nxtrain/parallel/pipeline.py": {
        "Pipeline._forward: entered.requires_grad_": "fresh: what the transfer received; values stay",
        "Pipeline._forward: underway.to_send['forward', chunk, micro] =": "host: dictionary",
        "Pipeline._forward: out.data": "read: what is sent",
        "Pipeline._forward: underway.passages[chunk, micro] =": "host: dictionary",
        "Pipeline._backward: underway.postponed[chunk, micro] =": "host: dictionary",
        "Pipeline._backward: underway.to_send['backward', chunk, micro] =": "host: dictionary",
        "Pipeline._transfer: underway.received[item] =": "host: dictionary",
        "Pipeline._transfer: underway.sent[direction] =": "host: dictionary",
        "Pipeline._exchange: underway.received[_item(receive)] =": "host: dictionary",
    },
    "nxtrain/parallel/regions.py": {
        "_ReduceSum.forward: comm.all_reduce(x)": (
            "given: `TensorParallel.exit` overwrites it, and autograd knows (`mark_dirty`)"
        ),
    },
    "nxtrain/common/sharding.py": {
        "ShardSpec.shard: view.copy_": "fresh: a view of the shard that this function allocates",
    },
    "nxtrain/common/testing/fault_kinds.py": {
        "flip: local.copy_": "state: parameter, which this fault damages",
    },
    "nxtrain/common/testing/faults.py": {
        "_Armed._count_steps.wrapped: self._step +=": "host: number",
    },
    "nxtrain/train/health/numerics.py": {
        "NumericsGuard.begin: self._in_a_row +=": "host: number",
    },
    "nxtrain/train/health/step_history.py": {
        "_note: entries.copy_": "state: ring of `StepHistory`",
    },
    "nxtrain/train/start.py": {
        "_resume: state.optimizer.num_updates.copy_": "state: optimizer state that is loaded",
        "settle: shard.copy_": "state: parameter that is loaded",
    },
    "nxtrain/train/step.py": {
        "train_step: state.sums.zero_": "state: sums of the step's state",
        "_accumulate.found: state.sums.add_": "state: sums of the step's state",
        "_over_batch: state.backend.collectives.all_reduce(sums)": "fresh: sums that `eval_step` made for this",
    },
    "models/decoder/model.py": {
        "CausalDecoder._tie: specs['weight'] =": "host: dictionary of a layer",
        "CausalDecoder._tie: self.lm_head.specs['weight'] =": "host: dictionary of a layer",
    },
}
