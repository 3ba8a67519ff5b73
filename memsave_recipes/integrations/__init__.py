"""Plans for people who keep their own trainer: Trainer and TRL, Lightning, Fabric, Accelerate, and plain loops.

NOTE [ decisions ]
1. A plan is made on the first batch that the trainer trains on, right before its first forward. By then the model is on
   its device, wrapped and resumed, and the batch is there: nothing is drawn from the data loader, its sampler or their
   random numbers. Collating rows of the data set instead would run its transforms and draw their random numbers.
2. The measured forward is the trainer's own: ``compute_loss`` or ``training_step``, under its precision. Gradients,
   buffers and generators are put back by ``preserve_state``, and a trainer's own numbers (sums of metrics, say) by
   ``preserve_attributes``. So a training with the plan ``none`` is that without us, bit for bit.
3. Later batches may be longer. A plan for a budget is made again before the first forward of a batch with more
   elements than any before, of which there are about as many as the logarithm of the number of steps. On several ranks,
   whose batches differ, it is not, and a line says so.
4. On several ranks all plan together on their first batches: one plan, and the largest peak of them has to fit.
5. The peak is compared with the prediction in the second step, since before that the optimizer has no state. On a CPU,
   which counts no allocations, that step is recorded by torch's profiler, as in a recipe; on a device the allocator is
   asked, in every step. In Lightning on a CPU it is the third step (``StepPeak``).
6. A second checkpointing, and what shards a model, are refused before anything is trained.
"""
