//! Benchmarks of single parts of the library. The parts are not public, so this runs only where the library
//! is built with `--cfg leasehold_internals`: `RUSTFLAGS="--cfg leasehold_internals" cargo bench --bench
//! micro`.

#[cfg(leasehold_internals)]
mod parts;

#[cfg(leasehold_internals)]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    parts::measure()
}

#[cfg(not(leasehold_internals))]
fn main() {
    println!("run RUSTFLAGS=\"--cfg leasehold_internals\" cargo bench --bench micro");
}
