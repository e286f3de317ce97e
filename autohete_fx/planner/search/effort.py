"""How much a solve does of what: shares of its time limit, rates by which they are counted as work, and where it does otherwise.

Work is counted and not timed, so that equal problems get equal plans.
"""

BOUND_SHARE, DECIDE_SHARE = 0.15, 0.1
"""The share of the time limit that work is counted out for, for each integer program."""
STARTS_SHARE, ROUNDING_SHARE, PROGRAMS_SHARE, ANNEALING_SHARE, POLISHING_SHARE = 0.02, 0.05, 0.05, 0.3, 0.02
"""Likewise for local search from patterns, from the rounded relaxation, from each program's decisions, for annealing where
there are no programs, and at the end.

All shares together stay well below the limit. The clock would make plans depend on the load. It thus ends the search only where
the machine is slow or busy for that many blocks.
"""
BESIDE_SHARES = 0.3, 0.1, 0.1, 0.1, 0.1, 0.1
"""Shares of that work where the machine has contention. The first is for annealing as soon as there is a plan, which says how long
work takes beside other work. The others are for each time that the best plan so far says so again."""
JUDGING_SHARE, JUDGED_BLOCKS_PER_SECOND = 0.03, 600
"""The share of the time limit for the simulator's judgement, each time, and its rate with contention on a busy machine.

The rate is of blocks times micro-batches.

Where that is not enough for one plan, the search knows nothing of contention, and the simulator judges a few in the end.
"""
RELAXATION_SHARE = 0.5
"""The share of the time limit, by the clock, for the relaxation.

Without it nothing is proven; it takes a tenth of this for few blocks.
"""
REASONS_SHARE = 0.08
"""Likewise for saying why, at the end."""
REPLAYED_BLOCKS_PER_SECOND, WALKED_BLOCKS_PER_SECOND = 1_500_000, 4_000_000
"""Rates of local search and of annealing on a usual core."""
SHARED_LANE, SHARED_LANE_BLOCKS = 2, 16
"""Where `figures.sends_at_once`, blocks take that many times as long to replay, or as often as the others go into their number."""
GATHERING = 2
"""Where blocks gather, they take that many times as long to replay and to branch on."""
PROGRAM_BLOCKS = 8
"""For more blocks CP-SAT does not try the integer programs: in the time there is it gets little further than their relaxation."""
BRANCHED_BLOCKS = 32
"""For more blocks than `PROGRAM_BLOCKS` and up to these all choices of the bounding program are branched on.

For more it is those of `relaxation.ends_of`, and where `figures.sends_at_once` for more than `MANY_BLOCKS`: that proves as much.
"""
BRANCHES_PER_SECOND, MOST_BRANCHES_PER_SECOND = 30_000, 12
"""Branches in a second of the time limit, the first over the cube of the number of blocks: work and use of a branch decide.

As with the search, work is counted, so that every run proves the same.
"""
LUMP_BRANCHES = 60
"""Branches on blocks with large parameters in one piece (`relaxation.lumps_of`), and on those with what stands at both ends.

The first are taken where a lump has a choice with more than a share of ``LEAST_MIXED`` and less than all.
"""
NEAR_DISTANCE = 3
"""The prefetch distance of a program that decides, one that walks give. The search begins at its relaxation and its dive, too.

The one that bounds has the memory of distance 1 and the time of the farthest, which no plan has.
"""
NEAR_BLOCKS = 32
"""That is for more blocks: for fewer, walks have rounds enough to leave a bad start."""
LEAST_MIXED = 0.05
MOST_BRANCHES = 1_000_000
"""Where `proven` branches until its time is over."""
MANY_BLOCKS = 16
"""With fewer, annealing has no more to find after less work, in proportion."""
FEW_RUNS = (1, 0.25), (0, 1.0), (2, 0.5)
"""The runs of annealing up to so many blocks: the seed of each and its share of that work.

The first tells soon whether there is something to find. A dozen blocks, of which one run in four ends 0.2% above the others
whatever its work, get another.
"""
LAST_RUNS = (3, 0.4), (4, 0.4), (5, 0.4)
"""Likewise those after these, in which walks give all prefetch distances.

A round takes a third longer then. They end elsewhere than the others, of 12 layers often in a better place, and each elsewhere.
"""
STAGNANT = 5e-4
"""Runs of one kind end after one that made the step faster by less than this share. The last runs begin if those before them made
it faster by more."""
RUN_INSTEAD = 1.75
"""The share by which annealing does more where it begins at rounded shares that local search has not improved.

That is for many blocks where `figures.sends_at_once`. Local search takes as long there, and finds less.
"""
ENOUGH = 0.0025
"""The search looks no further where a plan's gap is this: predictions err by more."""
MOST_CHOICES = 200_000
"""Where blocks times all their choices are more, the search is among those that the relaxation uses, and mixtures of these.

Without a relaxation it is among those of patterns.
"""
STARTS, IMPROVED_STARTS, ROUNDINGS, POLISHED = 12, 2, 2, 3
"""The most patterns that are starts, and of these, of rounded shares and of what annealing finds those that are improved."""
FEWEST_JUDGED, JUDGED = 3, 10
"""Plans that the simulator judges at least in the end, and at most each time, where the machine has contention."""
