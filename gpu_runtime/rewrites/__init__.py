"""Other ways to run a network, as options that the plan weighs. Read siblings.py first.

Enters and leaves: a `Network`. Each module's `offer` adds ops that exist only under an option (`Op.when`) and never decides.
All options of a group compute the same outputs.

blocks: space-to-depth as taps of weights; channels: shuffles as columns of weights; upsampling: residuals read where they
are small; shared_concats; siblings: convolutions of one input as one; squeeze_excite and back_to_back: layers as one launch.
"""
