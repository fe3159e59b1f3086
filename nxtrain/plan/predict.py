"""Prediction for one layout: device memory, step time, checkpoints, goodput, days and cost."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from nxtrain.optim.schedule import Schedule, decay_factor, rule_schedules
from nxtrain.plan.adapters import frozen_bytes
from nxtrain.plan.goodput import Failures
from nxtrain.plan.job import SIZES, Job
from nxtrain.plan.memory import Bytes, checkpoint_bytes, ema_size, host_bytes, master_size, rank_bytes
from nxtrain.plan.moments import accumulated_size, in_flight
from nxtrain.plan.ramps import RampPart, ramp_parts, tokens_within
from nxtrain.plan.speed import StepTime, step_time
from nxtrain.plan.work import model_flops_per_token, trained_params

GIB = 1 << 30
DAY_S, HOUR_S = 86_400.0, 3600.0

INTERRUPTIONS_PER_CHIP_S = 466 / (54 * DAY_S * 16_384)
"""Interruptions of a run per GPU or Trainium chip and second: 466 in 54 days on 16,384 GPUs.

Source: Grattafiori et al. 2024 (arXiv:2407.21783) section 3.3.4.
"""

STORE_BYTES_S = 1e9
"""Default rate at which one machine writes to the checkpoint store, in bytes per second."""

RESTART_S = 600.0
"""Default time from a failure to the next step, in seconds."""

COPY_BYTES_S = 5e9
"""Rate of copies from one machine's devices to host memory, in bytes per second; training waits for the copies."""

LEAST_GOODPUT = 1e-6
"""Goodput below which a run is predicted never to finish."""

COMPILE_BYTES = 64 * GIB
"""Host memory in bytes for one compilation process, as `nxtrain compile --workers` assumes."""

CHINCHILLA = 20
"""Tokens per parameter of a compute-optimal run.

Source: Hoffmann et al. 2022 (arXiv:2203.15556).
"""


@dataclass(frozen=True)
class Assumptions:
    """Values that a prediction needs and a configuration does not have.

    Args:
        tokens: Tokens of the run; 0 for the tokens of `train.steps`.
        data_bytes: Bytes of the data set with these tokens; 0 if unknown.
        device_hours: Device hours that the run may take, from which its tokens follow; 0 if the tokens are given.
        store_bytes_s: Bytes per second that one machine writes to the checkpoint store.
        mtbf_s: Mean time between failures of the run in seconds; 0 to derive it from the number of chips.
        price_usd_h: Price of a machine per hour in USD; None for the price in the table of machines.
        unknown_length: Reason why the length of the run is unknown; empty if the length is known.
    """

    tokens: float = 0.0
    data_bytes: float = 0.0
    device_hours: float = 0.0
    store_bytes_s: float = STORE_BYTES_S
    mtbf_s: float = 0.0
    price_usd_h: float | None = None
    unknown_length: str = ""


@dataclass(frozen=True)
class Prediction:
    """Predicted memory, time and cost of a run with one layout.

    Args:
        job: The run.
        assumed: Values that the configuration does not have.
        stage: Pipeline stage whose ranks need most device memory.
        bytes: Device memory of a rank of this stage.
        time: Time of a step.
    """

    job: Job
    assumed: Assumptions
    stage: int
    bytes: Bytes
    time: StepTime

    @staticmethod
    def of(job: Job, assumed: Assumptions) -> Prediction:
        """Compute the prediction for a job."""
        stage, num_bytes = rank_bytes(job)
        return Prediction(job, assumed, stage, num_bytes, step_time(job))

    @property
    def reasons(self) -> list[str]:
        """Reasons why the run does not fit on its machines; empty if the run fits."""
        machine = self.job.machine
        num_devices = machine.devices * self.job.nodes
        reasons = []
        if self.bytes.total > machine.device_bytes:
            parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in self.bytes.to_json().items() if size)
            reasons.append(
                f"a rank of stage {self.stage} needs {self.bytes.total / GIB:.2f} GiB, and a device of {machine.name} "
                f"has {machine.device_bytes / GIB:.2f} GiB: {parts}"
            )
        if self.job.world > num_devices:
            reasons.append(
                f"{self.job.config.parallel.degrees} = {self.job.world} ranks, and {self.job.nodes} x "
                f"{machine.name} has {num_devices} devices"
            )
        return reasons

    @property
    def tokens_per_s(self) -> float:
        """Throughput of all ranks together, in tokens per second."""
        return self.job.tokens_per_step / self.time.step_s

    @property
    def tokens(self) -> float | None:
        """Tokens of the run: as given, by `train.steps`, or as many as the device hours allow; None if unknown."""
        if self.assumed.unknown_length:
            return None
        if self.assumed.device_hours:
            return tokens_within(self.job, self.assumed.device_hours * HOUR_S / self.job.world, self.tokens_per_s)
        train = self.job.config.train
        return self.assumed.tokens or float(train.batch_sizes().before(train.steps) * train.seq_len)

    @property
    def days(self) -> float | None:
        """Days of training without failures; None if the length of the run is unknown."""
        if self.tokens is None:
            return None
        if not self.ramp:
            return self.tokens / self.tokens_per_s / DAY_S
        return sum(part.seconds for part in self.ramp) / DAY_S

    @cached_property
    def ramp(self) -> tuple[RampPart, ...]:
        """Parts of a run with a batch or sequence length ramp; empty without a ramp or if the length is unknown."""
        if self.tokens is None:
            return ()
        return ramp_parts(self.job, self._num_steps(self.tokens))

    @property
    def device_hours(self) -> float | None:
        """Device hours of the run without failures, over all devices; None if the length of the run is unknown."""
        if self.days is None:
            return None
        return self.days * DAY_S / HOUR_S * self.job.world

    @property
    def price_usd_h(self) -> float | None:
        """Price of a machine per hour in USD; None if unknown."""
        if self.assumed.price_usd_h is None:
            return self.job.machine.price_usd_h
        return self.assumed.price_usd_h

    @property
    def cost_usd(self) -> float | None:
        """Cost of the run on all machines in USD, without failures; None if the price or the length is unknown."""
        price, days = self.price_usd_h, self.days
        if price is None or days is None:
            return None
        return price * self.job.nodes * days * 24

    @property
    def trained_params(self) -> int:
        """Number of trained parameters of the whole model."""
        return trained_params(self.job)

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of a checkpoint of the whole run, without a frozen model, which checkpoints do not contain."""
        return checkpoint_bytes(self.job, self.trained_params)

    def failures(self) -> Failures:
        """Failure rate of the run, and the costs of its checkpoints and restarts."""
        machines = max(1, -(-self.job.world // self.job.machine.devices))
        write_s = self.checkpoint_bytes / (machines * self.assumed.store_bytes_s)
        copy_s = self.checkpoint_bytes / (machines * COPY_BYTES_S)
        chips = self.job.world * self.job.machine.accelerators / self.job.machine.devices
        mtbf_s = self.assumed.mtbf_s or 1.0 / (INTERRUPTIONS_PER_CHIP_S * chips)
        if self.job.config.checkpoint.async_:
            return Failures(mtbf_s=mtbf_s, stall_s=copy_s, write_s=write_s, restart_s=RESTART_S)
        return Failures(mtbf_s=mtbf_s, stall_s=write_s, restart_s=RESTART_S)

    def to_json(self) -> dict[str, Any]:
        """Prediction as a JSON object, whose first keys keep their names across versions."""
        time, job = self.time, self.job
        return {
            "fits": not self.reasons,
            "reasons": [*self.reasons, *filter(None, [self.assumed.unknown_length])],
            "hbm_bytes": job.machine.device_bytes,
            "bytes": self.bytes.to_json(),
            "host_bytes": host_bytes(self.job, self.stage),
            "step_time_s": time.step_s,
            "tokens_per_s": self.tokens_per_s,
            "sequences_per_s": job.config.train.global_batch / time.step_s,
            "mfu": time.mfu,
            "checkpoint_bytes": self.checkpoint_bytes,
            "cost_usd": self.cost_usd,
            "days": self.days,
            "instance": job.machine.name,
            "nodes": job.nodes,
            "parallel": layout_json(job),
            "stage": self.stage,
            "in_flight": in_flight(job, self.stage),
            "micro_batches": job.num_micro,
            "params": job.dimensions.num_params,
            "active_params": job.dimensions.num_active_params,
            "method": job.method,
            "trained_params": self.trained_params,
            "trained_share": self.trained_params / job.dimensions.num_params,
            "model_bytes": self._model_bytes_json(),
            "flops_per_token": model_flops_per_token(job),
            "compute_s": time.compute_s,
            "update_s": time.update_s,
            "bubble": time.bubble,
            "communication": [
                {"axis": t.axis, "link": t.link, "bytes": t.bytes, "seconds": t.seconds, "hidden": t.hidden}
                for t in time.traffic
            ],
            "speed_basis": time.basis,
            "checkpoint": self._checkpoint_json(),
            "run": self._run_json(),
            "compile": self._compile_json(),
            "cost_note": self._cost_note(),
        }

    def _model_bytes_json(self) -> dict[str, int]:
        """Bytes of the whole model's training state, independent of the layout."""
        job, trained = self.job, self.trained_params
        frozen = 0
        if job.adapters is not None:
            quantized = job.method == "qlora"
            stages = [frozen_bytes(stage, 1, 1, job.params_size, quantized=quantized) for stage in job.stages]
            frozen = sum(stage.held for stage in stages)
        kinds = {
            "params": trained * job.stored_size + frozen,
            "masters": trained * master_size(job),
            "grads": trained * accumulated_size(job),
            "moments": trained * 2 * SIZES[job.config.precision.state],
            "ema": trained * ema_size(job),
        }
        return {**kinds, "total": sum(kinds.values())}

    def _checkpoint_json(self) -> dict[str, Any]:
        failures, step_s = self.failures(), self.time.step_s
        every = failures.best_every(step_s)
        return {
            "write_s": failures.write_s or failures.stall_s,
            "stall_s": failures.stall_s,
            "store_bytes_s": self.assumed.store_bytes_s,
            "mtbf_s": failures.mtbf_s,
            "best_every": every,
            "best_interval_s": every * step_s,
            "goodput": failures.shares(max(every * step_s, failures.write_s)).goodput,
        }

    def _run_json(self) -> dict[str, Any]:
        params = self.job.dimensions.num_active_params
        tokens = self.tokens
        days = self.days
        goodput = self._checkpoint_json()["goodput"]

        def of_run(per_token: float) -> float | None:
            return None if tokens is None else per_token * tokens

        flops = of_run(model_flops_per_token(self.job))
        if self.ramp:
            flops = sum(part.flops for part in self.ramp)
        steps = days_with_failures = None
        if tokens is not None:
            steps = self._num_steps(tokens)
        if days is not None and goodput > LEAST_GOODPUT:
            days_with_failures = days / goodput
        of_adapters = {}
        if self.job.adapters is not None:
            of_adapters["flops_4nd"] = of_run(4.0 * params)
        rates = ""
        if not (self.assumed.unknown_length or self.assumed.tokens or self.assumed.device_hours):
            rates = Schedule.of(self.job.config).describe()
            if self.job.config.optim.weight_decay_schedule != "constant":
                rates += f"; weight decay {decay_factor(self.job.config.optim)}"
            for name, schedule in rule_schedules(self.job.config.optim).items():
                rates += f"; {name} {schedule.describe()}"
        return {
            "schedule": self.job.config.optim.schedule,
            "learning_rates": rates,
            "steps": steps,
            "tokens": tokens,
            "data_bytes": self.assumed.data_bytes or None,
            "device_hours": self.device_hours,
            "flops_6nd": of_run(6.0 * params),
            **of_adapters,
            "flops": flops,
            "ramp": [part.to_json() for part in self.ramp],
            "chinchilla_tokens": CHINCHILLA * params,
            "days_with_failures": days_with_failures,
        }

    def _num_steps(self, tokens: float) -> int:
        """Number of optimizer updates that consume a number of tokens."""
        train = self.job.config.train
        if not train.batch_ramp:
            return math.ceil(tokens / self.job.tokens_per_step)
        return train.batch_sizes().steps_for(tokens / train.seq_len)

    def _compile_json(self) -> dict[str, Any]:
        """Number of graphs to compile on lazy devices: micro-batch and update graphs of each pipeline stage."""
        if not self.job.is_lazy:
            return {"graphs": 0, "host_bytes": 0}
        parallel = self.job.config.parallel
        graphs = 1
        if parallel.pp > 1:
            graphs = parallel.pp * (2 * parallel.virtual_pp + 1)
        elif self.job.num_micro > 1:
            graphs = 2
        workers = min(graphs, max(1, self.job.machine.host_bytes // COMPILE_BYTES))
        return {"graphs": graphs, "workers": workers, "host_bytes": workers * COMPILE_BYTES}

    def _cost_note(self) -> str:
        if self.assumed.price_usd_h is not None:
            return f"{self.assumed.price_usd_h:g} USD per machine and hour, as given"
        price, note = self.job.machine.price_usd_h, self.job.machine.price_note
        if price is None:
            return note
        return f"{price:g} USD per machine and hour, {note}"


def layout_json(job: Job) -> Mapping[str, Any]:
    """Configuration values that define a layout, as a JSON object."""
    parallel, train = job.config.parallel, job.config.train
    return {
        "tp": parallel.tp,
        "cp": parallel.cp,
        "cp_method": parallel.cp_method,
        "pp": parallel.pp,
        "dp": parallel.dp,
        "ep": parallel.ep,
        "virtual_pp": parallel.virtual_pp,
        "schedule": parallel.schedule,
        "sequence_parallel": parallel.sequence_parallel,
        "shard": parallel.shard,
        "micro_batch": train.micro_batch,
        "remat": train.remat,
    }
