//! The guide: the pages of docs/, each as a module. Compiled for the API docs only.
//!
//! - [`guarantees`]: what a lock promises, what it does not, what fencing adds, and what happens in each failure.
//! - [`shared_locks`]: read-write locks, semaphores, and limits of how often work starts.
//! - [`several_keys`]: several locks at once, and the safe transfer between two accounts.
//! - [`choosing_a_ttl`]: the ttl, and the settings that go with it.
//! - [`settings`]: every setting with its default and its bounds, and the rules for keys.
//! - [`failures`]: every error and every reason for a loss, and what to do then.
//! - [`replicas`]: locks that survive a fail-over, because replicas have acknowledged them.
//! - [`topologies`]: one server, Sentinel or a Cluster: their URLs, guarantees, fail-overs and costs.
//! - [`quorum`]: locks over independent servers, and the critique of Redlock point by point.
//! - [`protocol`]: the protocol of a quorum, its proofs and its bounds, for engineers who want to check it.
//! - [`in_your_redis`]: which servers work, what is stored in them, and which rights the user needs.
//! - [`security`]: the threat model: other users of the same Redis, the network, names that users choose.
//! - [`observability`]: events, spans and metrics, and what to alert on.
//! - [`performance`]: what a lock costs beside other locks, why, and how to measure it.
//! - [`market`]: WATCH, one lock, a lock per item: what each costs, and when to use which.
//! - [`testing`]: outages, expiry and losses in unit tests, without a server.
//! - [`tokio`]: locks in async code.
//! - [`cli`]: the program `leasehold`, which runs commands under locks, and shows and frees locks.
//! - [`conformance`]: what is required of a lock, line by line, and the tests for it.
//! - [`other_libraries`]: locks that services with redis-py, redsync, Redlock, Redisson and others take, too.
//! - [`coming_from`]: for users of redis-py, Redisson, rslock, redlock, redsync, ShedLock, and the elections of Curator,
//!   etcd and client-go.
//! - [`migration`]: the steps from another lock library to this one, while services of both run.

/// Makes a module from a page. If a link is defined twice, the first definition counts. So links between pages lead to
/// modules in the API docs, and to files on a code host.
macro_rules! page {
    ($name:ident, $file:literal $(, $links:literal)?) => {
        $(#[doc = include_str!($links)])?
        #[doc = "[choosing a ttl]: choosing_a_ttl"]
        #[doc = "[failures]: failures"]
        #[doc = "[guarantees]: guarantees"]
        #[doc = "[migration]: migration"]
        #[doc = "[in your Redis]: in_your_redis"]
        #[doc = "[observability]: observability"]
        #[doc = "[other libraries]: other_libraries"]
        #[doc = "[performance]: performance"]
        #[doc = "[protocol]: protocol"]
        #[doc = "[quorum]: quorum"]
        #[doc = "[replicas]: replicas"]
        #[doc = "[security]: security"]
        #[doc = "[settings]: settings"]
        #[doc = "[the market]: market"]
        #[doc = "[several keys]: several_keys"]
        #[doc = "[shared locks]: shared_locks"]
        #[doc = "[topologies]: topologies"]
        #[doc = ""]
        #[doc = include_str!($file)]
        pub mod $name {}
    };
}

page!(guarantees, "../docs/guarantees.md");
page!(shared_locks, "../docs/shared_locks.md");
page!(several_keys, "../docs/several_keys.md");
page!(choosing_a_ttl, "../docs/choosing_a_ttl.md");
page!(settings, "../docs/settings.md");
page!(failures, "../docs/failures.md");
page!(replicas, "../docs/replicas.md");
page!(topologies, "../docs/topologies.md");
page!(quorum, "../docs/quorum.md");
page!(protocol, "../docs/protocol.md");
page!(in_your_redis, "../docs/redis.md");
page!(security, "../docs/security.md");
page!(observability, "../docs/observability.md");
page!(performance, "../docs/performance.md");
page!(market, "../docs/market.md");
page!(testing, "../docs/testing.md");
page!(tokio, "../docs/tokio.md");
page!(cli, "../docs/cli.md", "../docs/pictures/links.txt");
page!(conformance, "../docs/conformance.md");
page!(other_libraries, "../docs/other_libraries.md");
page!(coming_from, "../docs/coming_from.md");
page!(migration, "../docs/migration.md");
