# Puts the server of a Debian package into the folder $1, with all libraries that it needs, so that it
# runs on a system of another suite. Installs nothing: apt-get keeps its state in the folder, too.
# $2: the suite, $3: the package, whose program has the same name, $4: another suite with the package, if any.
set -eu
folder=$1 suite=$2 package=$3 extra=${4:-}
. /etc/os-release
if [ "${ID:-}" != debian ]; then
    echo "$package comes from Debian's packages, but this system is ${PRETTY_NAME:-no Debian}" >&2
    exit 1
fi

state=$folder/apt root=$folder/root
mkdir -p "$state/sources" "$state/lists/partial" "$state/archives/partial" "$root"
# No package counts as installed, so apt-get downloads all of them.
: >"$state/status"
# The system's own sources, of the other suite.
for file in /etc/apt/sources.list /etc/apt/sources.list.d/*.list /etc/apt/sources.list.d/*.sources; do
    [ ! -f "$file" ] || sed "s/\b$VERSION_CODENAME\b/$suite/g" "$file" >"$state/sources/${file##*/}"
done
# The other suite is at the first of these sources.
if [ -n "$extra" ]; then
    uri=$(cat "$state"/sources/* | sed -n 's/^URIs: *\([^ ]*\).*/\1/p; s/^deb  *\(\[[^]]*\] *\)\{0,1\}\([^ ]*\).*/\2/p' | head -n 1)
    key=$(cat "$state"/sources/* | sed -n 's/^Signed-By: *\(\/.*\)/\1/p' | head -n 1)
    echo "deb ${key:+[signed-by=$key] }$uri $extra main" >"$state/sources/extra.list"
fi
apt() {
    apt-get -o Dir::Etc::SourceList=/dev/null -o Dir::Etc::SourceParts="$state/sources" \
        -o Dir::State::Lists="$state/lists" -o Dir::State::Status="$state/status" \
        -o Dir::Cache::Archives="$state/archives" -o Dir::Cache::PkgCache= -o Dir::Cache::SrcPkgCache= \
        -o APT::Install-Recommends=false -o APT::Sandbox::User= -o APT::Update::Post-Invoke= \
        -o Debug::NoLocking=true "$@"
}
apt -q update
apt -q -y --download-only ${extra:+--target-release "$extra"} install "$package"
for file in "$state"/archives/*.deb; do
    dpkg-deb -x "$file" "$root"
done
rm -r "$state"

# The system's own loader and C library may be too old for it.
loader=$(cd "$root" && find . -name 'ld-linux*.so.*' -path '*-linux-gnu*' -type f)
system=$(basename "$(dirname "$loader")")
cat >"$folder/redis-server" <<END
#!/bin/sh
root=\${0%/*}/root
exec "\$root/$loader" --argv0 redis-server \\
    --library-path "\$root/lib/$system:\$root/usr/lib/$system" "\$root/usr/bin/$package" "\$@"
END
chmod +x "$folder/redis-server"
