//! Mistakes of known designs on a real Redis, each made as that design makes it. The checks that leasehold passes find
//! each mistake.

mod callers;
mod owners;
mod raw;
mod transactions;
mod ttls;
