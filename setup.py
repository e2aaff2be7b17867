from glob import glob

from setuptools import find_packages, setup

package_name = "vslam_features"
ros_wheels = [
    "ros-kilted-" + name
    for name in (
        "rclpy rmw-fastrtps-cpp sensor-msgs std-msgs geometry-msgs nav-msgs visualization-msgs "
        "diagnostic-msgs lifecycle-msgs std-srvs"
    ).split()
]
bags = ["rosbags>=0.11"]
# Older: an IR version that onnx refuses to check, a Split of other arguments.
models = ["onnx>=1.16", "spox>=0.18", "onnx-ir>=1.0", "ml_dtypes>=0.5"]
hloc = ["h5py>=3.1"]
faiss = ["faiss-cpu>=1.7.4"]
weights = ["safetensors>=0.4"]
test = ["pytest>=7", "pytest-timeout", "hypothesis", "scikit-image", *bags, *hloc, *faiss, *weights]

setup(
    name=package_name,
    version="0.1.0",
    packages=find_packages(include=[package_name, package_name + ".*"]),
    package_data={package_name: ["codebooks/*.npz", "golden/*", "replay/*.html.j2"]},
    data_files=[
        ("share/ament_index/resource_index/packages", ["resource/" + package_name]),
        ("share/" + package_name, ["package.xml"]),
        ("share/" + package_name + "/launch", glob("launch/*.launch.py")),
        ("share/" + package_name + "/config", glob("config/*")),
        ("share/" + package_name + "/models", glob("models/*.yaml")),
    ],
    python_requires=">=3.10",
    install_requires=[
        "numpy>=1.21",
        "opencv-python-headless>=4.5.4",
        "pillow>=9.0",
        "pyyaml>=5.4",
        "tqdm>=4.57",
        "jinja2>=3.0",
        *bags,
    ],
    extras_require={
        "poselib": ["poselib>=2.0.4; platform_machine == 'x86_64'"],
        # cpu and cuda exclude each other: both install the package onnxruntime, each over the other.
        "cpu": ["onnxruntime>=1.16"],
        "cuda": ["onnxruntime-gpu>=1.16"],
        # On a Jetson TensorRT is that of JetPack, and cuda-python that of its CUDA (docs/deployment.md).
        "tensorrt": ["tensorrt>=10.1; platform_machine == 'x86_64'", "cuda-python>=12.2"],
        "openvino": ["openvino>=2024.0"],
        "models": models,
        "hloc": hloc,
        "faiss": faiss,
        # torch: from 2.9 on its exporter is the one of torch.export; kornia is for the comparison with upstream's code.
        "export": ["torch>=2.9", "onnxscript>=0.5", "kornia>=0.7", *weights, *models],
        "ros": ros_wheels,
        "test": test,
        "dev": [*test, "ruff", "colcon-common-extensions", "colcon-ros", "pycolmap; platform_machine == 'x86_64'"],
    },
    zip_safe=False,
    maintainer="vslam_features maintainers",
    maintainer_email="maintainers@vslam-features.invalid",
    description="Visual front-end of a SLAM system that never fails silently: features, matches, places, loops",
    license="Apache-2.0",
    entry_points={
        "console_scripts": [
            "vslam-features = vslam_features.cli.main:main",
            "frontend_node = vslam_features.ros.entry:frontend",
            "player_node = vslam_features.ros.entry:player",
            "recorder_node = vslam_features.ros.entry:recorder",
        ],
    },
)
