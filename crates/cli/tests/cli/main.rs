//! Runs the program `leasehold` as users do, with real processes and servers. The names of rows, such as I8, are those
//! of docs/conformance.md.

mod election;
mod faults;
mod looks;
mod run;
mod settings;
mod support;
#[cfg(target_os = "linux")]
mod terminal;
