#!/bin/sh
# The entry point of a SageMaker training job of several instances, in its source folder beside the script:
#
#     PyTorch(entry_point="sagemaker.sh", source_dir=…, instance_count=2, environment={"RINGRUN_KEY": …}, …).fit()
exec ringrun join python torch_resnet.py --synthetic
