# Hold a copy-on-write view of the files in the folder $1. The new files lie in memory, and end with the namespace.
set -e
mount -t tmpfs none "$1"
mkdir "$1/upper" "$1/work" "$1/root"
mount -t overlay none -o lowerdir=/,upperdir="$1/upper",workdir="$1/work" "$1/root"
cd "$1/root"
mount -t proc none proc
mount --rbind /dev dev
mkdir -p app tests solution logs/agent logs/verifier logs/artifacts
exec chroot . sleep infinity
