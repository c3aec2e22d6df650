"""Other ways to run a network, as options that the plan weighs. Read siblings.py first.

Enters and leaves: a `Network`. Each module's `offer` adds ops that exist only under an option (`Op.when`) and never decides.
All options of a group compute the same outputs; where options of two groups leave a tensor without an op that makes it, no plan
has both.

A rewrite asks the network for ops in a row, or for readers that can take a tensor (`Network.row`, `takers`, `alone`), makes one
op of several (`network.joined`), and offers it (`network.Options.either`). A rewrite that makes another form of the network
offers the form's differences (drafts).

blocks: space-to-depth as taps of weights; windows: windows that do not overlap as products; transposed: transposed convolutions
as one with depth-to-space; channels: shuffles as columns of weights; upsampling: residuals read at their small size;
shared_concats; siblings: convolutions of one input as one; pieces: convolutions of slices of one input; squeeze_excite and
back_to_back: layers as one launch, products in front of convolutions, and squeeze-excite with the convolution ahead; integers:
convolutions of quantised tensors on their whole numbers; chained: stages in the launch before them; norms: normalizations in
front of convolutions; attention: attention with the moves of its operands.
"""
