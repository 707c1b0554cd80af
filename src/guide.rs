//! The guide: the pages of docs/, as they stand there, in these docs. Nothing else; compiled for them only.
//!
//! - [`guarantees`]: what a lock promises, what not, what fencing adds, and what happens when.
//! - [`choosing_a_ttl`]: the ttl, and the settings that go with it.
//! - [`failures`]: every error and every reason for a loss, and what to do then.
//! - [`observability`]: events, spans, metrics, and what to be woken for.
//! - [`performance`]: what a lock costs beside others, why, and how to measure it.
//! - [`market`]: WATCH, one lock, a lock per item: what each costs, and when.
//! - [`testing`]: outages, expiry and losses in unit tests, without a server.
//! - [`tokio`]: locks in async code.
//! - [`security`]: what other users of the same Redis can do, with each right, and what not.
//! - [`conformance`]: what is asked of a lock, line by line, and the tests that hold it.
//! - [`coming_from`]: for users of redis-py, Redisson, rslock and redlock.

/// A page. Of two definitions of a link the first counts: here pages are modules and not files.
macro_rules! page {
    ($name:ident, $file:literal) => {
        #[doc = "[choosing a ttl]: choosing_a_ttl"]
        #[doc = "[failures]: failures"]
        #[doc = "[guarantees]: guarantees"]
        #[doc = "[security]: security"]
        #[doc = ""]
        #[doc = include_str!($file)]
        pub mod $name {}
    };
}

page!(guarantees, "../docs/guarantees.md");
page!(choosing_a_ttl, "../docs/choosing_a_ttl.md");
page!(failures, "../docs/failures.md");
page!(observability, "../docs/observability.md");
page!(performance, "../docs/performance.md");
page!(market, "../docs/market.md");
page!(testing, "../docs/testing.md");
page!(tokio, "../docs/tokio.md");
page!(security, "../docs/security.md");
page!(conformance, "../docs/conformance.md");
page!(coming_from, "../docs/coming_from.md");
