//! Benchmarks of single parts of the library. The parts are not public, so this runs only where the library
//! is built with `--cfg leasehold_internals`: `RUSTFLAGS="--cfg leasehold_internals" cargo bench --bench
//! micro`. With `LEASEHOLD_BENCH_BUSY=1`, it runs beside one busy loop per core.

#[cfg(leasehold_internals)]
mod parts;
#[cfg(leasehold_internals)]
#[path = "../support/mod.rs"]
mod support;

#[cfg(leasehold_internals)]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    parts::measure()
}

#[cfg(not(leasehold_internals))]
fn main() {
    println!("run RUSTFLAGS=\"--cfg leasehold_internals\" cargo bench --bench micro");
}
