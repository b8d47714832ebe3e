"""Choose the stages that a run needs; each option of the algorithm is one stage."""

from collections.abc import Callable
from functools import partial

from lightrft.algorithms.covariance import marks
from lightrft.algorithms.kl import EntropyCoefficient, KLCoefficient
from lightrft.algorithms.roles.critic import Critic
from lightrft.algorithms.roles.policy import Policy
from lightrft.algorithms.roles.teacher import Teacher
from lightrft.algorithms.rollout.experience import BranchExperience, EarlyOutputs
from lightrft.algorithms.stages import advantages, filters
from lightrft.algorithms.stages.branch_weights import BranchWeights, split_among_branches
from lightrft.algorithms.stages.penalty import EntropyControl, KLPenalty
from lightrft.algorithms.stages.tokens import HighEntropyTokens, LearnedObservations, SelectedTokens
from lightrft.config.sections import AlgorithmSection, TrainSection
from lightrft.core.advantages import CompareRewards, PolicyLogprobs, RewardToGo, Stage
from lightrft.core.batch import Experience
from lightrft.core.experience import ExperienceMaker, LocalStage, flatten


def experience_maker(
    policy: Policy,
    algorithm: AlgorithmSection,
    train: TrainSection,
    *,
    compare: CompareRewards,
    kl_coefficient: KLCoefficient,
    entropy_coefficient: EntropyCoefficient | None = None,
    critic: Critic | None = None,
    teacher: Teacher | None = None,
    flatten: Callable[..., Experience] = flatten,
    teacher_columns: LocalStage | None = None,
    num_updates: int = 0,
    branches: bool = False,
) -> ExperienceMaker:
    """Build the experience maker of a run.

    `num_updates`: how many optimizer steps use the samples of a step, for --overlap; 0 without it.
    `branches`: samples may have branches, and a sample's branches are learned in the same optimizer
    step.
    """
    # Samples are masked before they are balanced, because only learned tokens are work.
    local_stages: list[LocalStage] = []
    if algorithm.length_filter or algorithm.mask_truncated:
        local_stages.append(filters.LengthFilter(algorithm.length_filter, algorithm.mask_truncated))
    if teacher_columns is not None:
        local_stages.append(teacher_columns)
    if algorithm.train_roles:
        local_stages.append(filters.RoleFilter(algorithm.train_roles))
    if algorithm.difficulty_filter:
        local_stages.append(filters.DifficultyFilter(algorithm.difficulty_filter))

    if algorithm.branch_weight == "episode":
        local_stages.append(split_among_branches)

    # stages in order: outputs of models, filters and penalties, advantages, tokens
    data = policy.strategy.data
    adapts_entropy = algorithm.entropy_target is not None
    entropy = bool(algorithm.entropy_filter or algorithm.high_entropy_token_ratio or adapts_entropy)
    # The KL is needed before the update if it is in the reward, or if the coefficient adapts.
    penalty = policy.reference is not None and (
        not algorithm.use_kl_loss or kl_coefficient.target is not None
    )
    selects = algorithm.policy_loss in marks

    chosen: list[Stage] = []
    if entropy or not algorithm.use_engine_logprobs:
        needed = selects or penalty or (teacher is not None and not algorithm.distill_top_k)
        chosen.append(
            (advantages.PolicyEntropy if entropy else PolicyLogprobs)(policy, needed=needed)
        )
    if algorithm.use_engine_logprobs:
        chosen.append(advantages.EngineLogprobs())
    if policy.reference is not None:
        chosen.append(advantages.ModelOutputs("reference_logprobs", policy.reference_logprobs))
    if critic is not None:
        chosen.append(advantages.ModelOutputs("values", critic.values))

    if algorithm.entropy_filter:
        chosen.append(filters.EntropyFilter(algorithm.entropy_filter))
    if adapts_entropy:
        chosen.append(EntropyControl(entropy_coefficient, data))
    if penalty:
        chosen.append(KLPenalty(algorithm, kl_coefficient, data))

    if critic is None:
        chosen.append(RewardToGo(algorithm.gamma))
    else:
        chosen.append(advantages.GeneralizedAdvantages(algorithm.gamma, algorithm.lambd, data.sum))
    if teacher is not None and not algorithm.distill_top_k:
        chosen.append(advantages.TeacherTerm(teacher, algorithm.distill_coef))
    if algorithm.advantages_norm or algorithm.advantage_clip is not None:
        chosen.append(
            advantages.NormalizedAdvantages(
                algorithm.advantages_norm, algorithm.advantage_clip, data.sum
            )
        )

    if algorithm.high_entropy_token_ratio:
        chosen.append(HighEntropyTokens(algorithm.high_entropy_token_ratio, data.sum))
    if selects:
        chosen.append(SelectedTokens(algorithm, data.sum))
    if algorithm.branch_weight == "episode":
        chosen.append(BranchWeights(data.sum, by_token=algorithm.loss_agg_mode == "token-mean"))
    if algorithm.observation_coef:
        chosen.append(LearnedObservations(algorithm.observation_coef, data.sum))
    # The last one, because its columns only matter to the update.
    if algorithm.distill_top_k:
        num_candidates = min(algorithm.distill_top_k, policy.vocabulary_size)
        chosen.append(advantages.TeacherDistribution(teacher, num_candidates))

    most = train.micro_train_batch_size
    if num_updates:
        flatten = EarlyOutputs(policy, flatten, chosen, num_updates, most)
    maker: type[ExperienceMaker] | partial[BranchExperience] = ExperienceMaker
    if branches:
        maker = partial(BranchExperience, across_roles=algorithm.role_advantage == "group")
    return maker(
        policy.strategy,
        compare,
        chosen,
        minibatch_size=train.train_batch_size,
        epochs=train.max_epochs,
        local_stages=local_stages,
        flatten=flatten,
        limits=policy.limits(most),
    )
