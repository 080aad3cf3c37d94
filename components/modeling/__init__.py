"""Everything that needs torch: the frozen backbone, distillation, the MTP head and its training."""
