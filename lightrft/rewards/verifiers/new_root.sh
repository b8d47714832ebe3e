# Give the command of the arguments a root of its own, as a shell of `unshare` in an empty folder.
#
# Only the folders before the command can be read there. The arguments before `--` are the size of
# /tmp in bytes and these folders. /proc shows processes only, or, where the kernel cannot do that,
# nothing. The command that follows ends the right to mount.
set -e
PATH=/usr/sbin:/usr/bin:/sbin:/bin
root=$(pwd -P)
mount -t tmpfs -o "size=$0,mode=755" tmpfs "$root"
cd "$root"
while [ "$1" != -- ]; do
    if [ -L "$1" ]; then
        cp -P "$1" ".$1"
    elif [ -d "$1" ]; then
        mkdir -p ".$1"
        mount --rbind "$1" ".$1"
    fi
    shift
done
shift
while read -r _ _ _ _ place options _; do
    place=$(printf %b "$place")
    case $place in
        "$root"/*) mount -o "remount,bind,ro,nosuid,nodev${options#r[ow]}" "$place" ;;
    esac
done </proc/self/mountinfo
mkdir old proc dev dev/shm tmp
mount -t proc -o subset=pid proc proc 2>/dev/null || :
for device in null zero random urandom; do
    : >"dev/$device"
    mount --bind "/dev/$device" "dev/$device"
done
ln -s /proc/self/fd dev/fd
for place in 0:stdin 1:stdout 2:stderr; do
    ln -s "/proc/self/fd/${place%:*}" "dev/${place#*:}"
done
for folder in tmp dev/shm; do
    mount -t tmpfs -o "size=$0,mode=1777,nosuid,nodev" tmpfs "$folder"
done
pivot_root . old
umount -l /old
rmdir /old
mount -o remount,bind,ro /
cd /tmp
unset OLDPWD
exec "$@"
