"""Mutants of the trainer: loss, advantages, weights of tokens, staleness, packing, the batch and the ledger."""

from __future__ import annotations

from tests.mutants.base import Mutant

(
    _LOSS, _ADVANTAGES, _AGGREGATION, _STALENESS, _PACKING, _LEDGER, _BATCH, _COLLATE, _MISMATCH, _RATIOS, _OVERLONG, _ASSEMBLE,
    _CUT, _FOREST, _ATTENTION, _PATHS, _CLIP,
    _DUAL_CLIP, _CISPO, _OWN, _STEP,
) = (
    f"trainer_bridge/steno_trainer/{name}.py"
    for name in (
        "objective/loss", "data/advantages", "objective/aggregation", "data/staleness", "packing/plan", "data/ledger",
        "data/rows", "packing/collate", "objective/mismatch", "objective/ratios", "data/overlong", "step/assemble",
        "packing/cut", "packing/forest", "model/attention", "model/paths", "objective/clip",
        "objective/dual_clip", "objective/cispo", "objective/own", "step/step",
    )
)  # fmt: skip


def _unit(*names: str) -> tuple[str, ...]:
    """Their files, of names as "objective/loss"."""
    return tuple(f"tests/unit/trainer/{room}/test_{name}.py" for room, name in (each.split("/") for each in names))


MUTANTS = (
    Mutant(
        "bounds-swapped", "the ratio is clipped by the wrong bound on each side", _CLIP,
        "ratios_N.clamp(1.0 - terms.clip_low, 1.0 + terms.clip_high)",
        "ratios_N.clamp(1.0 - terms.clip_high, 1.0 + terms.clip_low)", _unit("objective/loss"),
    ),
    Mutant(
        "ratio-without-gradient", "without proximal log-probabilities the loss has no gradient", _LOSS,
        "proximal_N = logprobs_N.detach() if given is None", "proximal_N = logprobs_N if given is None", _unit("objective/loss"),
    ),
    Mutant(
        "reference-turned-round", "the reference's divergence is taken the wrong way round", _LOSS,
        "_k3(reference_N - logprobs_N)", "_k3(logprobs_N - reference_N)", _unit("objective/loss"),
    ),
    Mutant(
        "teacher-turned-round", "what the teacher would not say is pushed up", _LOSS,
        "_cut(reference_N - start_N)", "_cut(start_N - reference_N)", _unit("objective/loss"),
    ),
    Mutant(
        "clipped-both-ways", "the clipped term is taken wherever it is larger", _CLIP,
        "torch.minimum(ratios_N * advantages_N, clipped_N * advantages_N)",
        "torch.maximum(ratios_N * advantages_N, clipped_N * advantages_N)", _unit("objective/loss"),
    ),
    Mutant(
        "floor-for-all", "the floor of dual_clip is under tokens of positive advantage too", _DUAL_CLIP,
        "down_N = terms.advantages_N < 0", "down_N = terms.advantages_N < 99", _unit("objective/objectives"),
    ),
    Mutant(
        "weight-with-gradient", "the weight of cispo has a gradient", _CISPO,
        "ratios_N = terms.ratios_N.detach()", "ratios_N = terms.ratios_N", _unit("objective/objectives"),
    ),
    Mutant(
        "averages-let-in", "a user's objective may look at other tokens", _OWN,
        "if abs(with_others - by_itself) > ALIKE * max(1.0, abs(by_itself)):", "if False:", _unit("objective/objectives"),
    ),
    Mutant(
        "entropy-punished", "a bonus on entropy punishes it", _LOSS,
        "losses_N = losses_N - objective.entropy_bonus * entropies_N",
        "losses_N = losses_N + objective.entropy_bonus * entropies_N",
        _unit("objective/loss"),
    ),
    Mutant(
        "mismatch-floor", "a truncated mismatch weight is raised to the lower bound too", _MISMATCH,
        "weights_N = rho_N.clamp(max=settings.high)", "weights_N = rho_N.clamp(min=settings.low, max=settings.high)",
        _unit("objective/loss", "objective/ratios"),
    ),
    Mutant(
        "sequence-without-gradient", "a sequence's ratio has no gradient", _RATIOS,
        "(sequence_means(cut_N, sequences) + (cut_N - cut_N.detach())).exp()", "sequence_means(cut_N, sequences).exp()",
        _unit("objective/ratios"),
    ),
    Mutant(
        "whole-population", "the standard deviation has n degrees of freedom", _ADVANTAGES,
        "for reward in rewards) / (len(rewards) - 1))", "for reward in rewards) / len(rewards))", _unit("data/advantages"),
    ),
    Mutant(
        "shaping-speaks", "a group whose rewards are equal says something by its shaping alone", _ADVANTAGES,
        "return [[member.reward for member in members]]", "return [[member.shaped for member in members]]",
        _unit("data/advantages", "data/overlong"),
    ),
    Mutant(
        "batch-of-bare-rewards", "the batch's standard deviation is that of rewards without their shaping", _ADVANTAGES,
        "return [member.shaped for member in members]", "return [member.reward for member in members]",
        _unit("data/advantages", "data/overlong"),
    ),
    Mutant(
        "zero-is-equal", "rewards whose mean is 0 are never equal enough", _ADVANTAGES,
        "return _std(rewards) <= EQUAL_WITHIN * max(abs(reward) for reward in rewards)",
        "return _std(rewards) < EQUAL_WITHIN * max(abs(reward) for reward in rewards)", _unit("data/advantages"),
    ),
    Mutant(
        "forks-weigh-more", "a trial weighs as many times as it has samples", _AGGREGATION,
        "return 1.0 / (rollouts * by_trial[part.trial_id])", "return 1.0 / (rollouts * part.trained_tokens)",
        _unit("objective/aggregation"),
    ),
    Mutant(
        "silent-samples", "samples of silent groups are counted, not their trials", _AGGREGATION,
        "len({p.trial_id for p in parts if p.trained_tokens})", "len([p.trial_id for p in parts if p.trained_tokens])",
        _unit("objective/aggregation", "step/orders"),
    ),
    Mutant(
        "last-version-judged", "only the last version of a sample is too old or not", _STALENESS,
        "too_old |= history.current.step", "too_old = history.current.step", _unit("data/staleness"),
    ),
    Mutant(
        "lost-steps-once", "lost steps are counted back, and not forward again", _STALENESS,
        "return VersionLag(self.current.step - version.step + over + lost, lost)",
        "return VersionLag(self.current.step - version.step + lost, lost)", _unit("data/staleness"),
    ),
    Mutant(
        "admits-one-step-more", "a step more of groups is admitted than can come in time",
        "rollouts/steno_rollouts/groups/admission.py",
        "groups_per_step * (max_staleness_steps + 1) - in_hand", "groups_per_step * (max_staleness_steps + 2) - in_hand",
        _unit("data/staleness"),
    ),
    Mutant(
        "base-goes-on", "a step that was never taken under the first weights is known", _STALENESS,
        "(over and number in (0, len(self.path) - 1))", "(over and number == len(self.path) - 1)", _unit("data/staleness"),
    ),
    Mutant(
        "alone-in-company", "samples that must be alone in a call are packed", _PACKING,
        "spread = None if alone else _spread(", "spread = _spread(", _unit("packing/packing"),
    ),
    Mutant(
        "no-exact-fit", "a sample never fills a micro-batch to the last token", _PACKING,
        "at = bisect_left(free, (piece.room, -1))", "at = bisect_left(free, (piece.room + 1, -1))", _unit("packing/packing"),
    ),
    Mutant(
        "full-bins-forgotten", "a micro-batch that was too full once gets no smaller sample either", _PACKING,
        "        for entry in full:\n            heapq.heappush(heap, entry)\n", "", _unit("packing/packing"),
    ),
    Mutant(
        "dealt-in-order", "the most expensive micro-batches all go to one rank", _PACKING,
        "zip(sorted(range(ranks), key=lambda r: (work[r], r)), row, strict=True)", "zip(range(ranks), row, strict=True)",
        _unit("packing/packing"),
    ),
    Mutant(
        "context-unjudged", "a sample is as old as what is trained of it, whatever it goes on from", _BATCH,
        "verdict = judge(terms.history, view.versions_of(view.policy_T), terms.max_staleness_steps)",
        "verdict = judge(terms.history, view.versions_of(trained_T), terms.max_staleness_steps)", _unit("data/batch"),
    ),
    Mutant(
        "booked-twice", "a token that is not trained for two reasons is booked under both", _BATCH,
        "        left_T = left_T & ~where_T\n    trained_T = left_T\n",
        "        trained_T = (trained_T if reason is not Reason.SYNTHETIC else left_T) & ~where_T\n", _unit("data/batch"),
    ),
    Mutant(
        "first-token-trained", "the first token of a sample may be trained", _BATCH,
        "            or trained_T[:1].any()\n", "", _unit("data/batch"),
    ),
    Mutant(
        "predicted-by-itself", "a token is scored by the state after it", _COLLATE,
        "_cat([found[where - 1] for", "_cat([found[where] for", _unit("packing/collate"),
    ),
    Mutant(
        "positions-go-on", "positions go on across the samples of a micro-batch", _COLLATE,
        "position_ids_1S=_cat(trie.positions)[None],",
        "position_ids_1S=torch.arange(trie.starts[-1])[None],", _unit("packing/collate"),
    ),
    Mutant(
        "cut-anywhere", "a trie is cut into the fewest pieces, whatever that repeats", _CUT,
        "cost = (repeated + (shared[trie[newest]] if newest else 0), pieces + 1)", "cost = (0, pieces + 1)",
        _unit("packing/forest"),
    ),
    Mutant(
        "shared-by-neighbours", "samples share what the last two on the way from one to the other share", _FOREST,
        "return min(row[first], row[last + 1 - (1 << height)])", "return row[last + 1 - (1 << height)]", _unit("packing/forest"),
    ),
    Mutant(
        "all-of-the-path-before", "a branch sees the whole segment that it leaves", _COLLATE,
        "found.append((start, min(end, start + tokens)))", "found.append((start, end))", _unit("packing/trie"),
    ),
    Mutant(
        "first-branch-alone", "keys that branches share have the gradient of the last branch alone", _PATHS,
        "ctx.sums.grad_GSD[:, start:end] += grad[:, at : at + end - start]",
        "ctx.sums.grad_GSD[:, start:end] = grad[:, at : at + end - start]", _unit("model/tree_attention"),
    ),
    Mutant(
        "paths-kept", "keys and values along paths are kept for the backward pass", _PATHS,
        "again = ways.get(tensor.untyped_storage().data_ptr())", "again = None", _unit("model/tree_attention"),
    ),
    Mutant(
        "aligned-to-the-left", "a branch sees the start of its path and not its end", _ATTENTION,
        "own = torch.arange(first, last, device=like.device)",
        "own = torch.arange(0, last - first, device=like.device)", _unit("model/tree_attention"),
    ),
    Mutant(
        "sequence-of-the-next", "a token at the start of a completion counts with the one before", _COLLATE,
        "torch.searchsorted(edges, where, right=True) - 1]", "(torch.searchsorted(edges, where) - 1).clamp(min=0)]",
        _unit("packing/collate"),
    ),
    Mutant(
        "masked-is-trained", "tokens that the mismatch took out are booked as trained too", _STEP,
        "ledger.trained(version, int(here_n.sum()) - masked)", "ledger.trained(version, int(here_n.sum()))",
        _unit("step/orders"),
    ),
    Mutant(
        "shared-tokens-twice", "the length of a trial counts a completion once for each path that it is on", _OVERLONG,
        "and not part.shared and not part.superseded", "and not part.superseded", _unit("data/overlong"),
    ),
    Mutant(
        "unusable-in-the-mean", "a reward that can't be computed with is part of the step's figures", _ASSEMBLE,
        "    scored = [trial for trial in scored if trial.group_id not in malformed]\n", "",
        _unit("run/crashes", "run/loop", "data/feed"),
    ),
    Mutant(
        "accounts-shared", "accounts that are handed out change with the ledger", _LEDGER,
        "return Account(account.sampled, account.trained, dict(account.untrained))",
        "return Account(account.sampled, account.trained, account.untrained)", _unit("data/ledger"),
    ),
    Mutant(
        "reason-replaced", "tokens of one reason take the place of those booked before", _LEDGER,
        "untrained[Reason(reason)] = untrained.get(reason, 0) + tokens", "untrained[Reason(reason)] = tokens",
        _unit("data/ledger"),
    ),
    Mutant(
        "unknown-uncounted", "sampled tokens without a version are not received", _LEDGER,
        "        tokens[UNKNOWN_VERSION] += turn.completion_tokens - known\n", "", _unit("data/ledger"),
    ),
    Mutant(
        "missing-explained-away", "whatever no sample holds is booked as unreadable", _LEDGER,
        "if reason is Reason.SUPERSEDED or turn.turn_id in unreadable:", "if True:", _unit("data/ledger"),
    ),
)  # fmt: skip
