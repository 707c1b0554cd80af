//! Users with exactly the rights that `leasehold acl` prints: everything works with them, and each of them is
//! needed. `conformance::redis_under_a_sentinel` and `conformance::redis_cluster` run the whole suite under these
//! rights. `cluster::rights` has the features of a Cluster.

use std::sync::{Arc, Mutex};

use leasehold::{Client, EnvironmentWarning, ErrorKind, OtherLibrary, Released};
use leasehold_testbed::{Reply, Server, eventually};

use self::rights::Version;
use crate::steady::steady;
use crate::support::{
    LONG_TTL, Recorder, SOON, Task, What, ask, in_redis, millis, notified_clients, queued, secs,
    server,
};

#[path = "../../crates/cli/src/acl/rights.rs"]
#[allow(dead_code, reason = "`leasehold acl` uses all of it")]
pub mod rights;

/// Creates the user `limited` with these rights and those of `more`, and returns its URL. Its password is `secret`.
pub fn create_limited_user(server: &Server, commands: &[&str], more: &[&str]) -> String {
    let rule = rights::rule("leasehold:", commands);
    let words = ["ACL", "SETUSER", "limited", "reset", "on", ">secret"];
    let rule = rule.iter().map(String::as_str);
    let words: Vec<&str> = words
        .into_iter()
        .chain(rule)
        .chain(more.iter().copied())
        .collect();
    ask(server, &words);
    as_limited(&format!("redis://127.0.0.1:{}", server.port()))
}

/// The URL with the login of the user of [`create_limited_user`].
pub fn as_limited(url: &str) -> String {
    url.replace("://", "://limited:secret@")
}

/// The version of the server, or the version of Redis that a Valkey names.
pub fn version(server: &Server) -> Version {
    let info = leasehold_load::info(server, "server").unwrap();
    numbers(&leasehold_load::field(&info, "redis_version").unwrap())
}

fn numbers(version: &str) -> Version {
    let mut numbers = version.split('.').map(|part| part.parse().unwrap());
    (numbers.next().unwrap(), numbers.next().unwrap())
}

/// The product and the version of the server, for its rules.
pub fn product(server: &Server) -> rights::Server {
    let info = leasehold_load::info(server, "server").unwrap();
    match leasehold_load::field(&info, "valkey_version") {
        Some(version) => rights::Server::Valkey(numbers(&version)),
        None => rights::Server::Redis(version(server)),
    }
}

/// The commands of these features that the server knows.
pub fn commands(server: &Server, features: &[&str]) -> Vec<&'static str> {
    rights::commands(&rights::features(features).unwrap(), product(server))
}

/// The commands and keys that the server has refused to users.
pub fn refused(server: &Server) -> Vec<String> {
    let refusals = refusals(server).into_iter();
    refusals.map(|(object, _)| object).collect()
}

/// The commands and keys that the server has refused to users, and how often it has refused each of them.
fn refusals(server: &Server) -> Vec<(String, i64)> {
    // Without a number, the reply has the last ten entries only.
    let Reply::Array(entries) = ask(server, &["ACL", "LOG", "1000"]) else {
        panic!("ACL LOG answers with an array");
    };
    let refusal = |entry: &Reply| {
        let Reply::Array(fields) = entry else {
            panic!("an entry is an array");
        };
        let field = |name| {
            let mut pairs = fields.chunks_exact(2);
            &pairs.find(|pair| pair[0].as_text() == Some(name)).unwrap()[1]
        };
        let object = field("object").as_text().unwrap().to_owned();
        (object, field("count").as_int().unwrap())
    };
    let refusals = entries.iter().map(refusal);
    // Redis 6.2 has no CLIENT SETINFO, but looks for the right to it. It names the command only.
    let is_old = version(server) < (7, 0);
    refusals
        .filter(|(object, _)| !(is_old && object == "client"))
        .collect()
}

/// A server, and a user of it with the rights of some features.
struct Trial {
    server: Server,
    url: String,
}

/// An effect of a missing right.
pub type Effect = String;

macro_rules! expect {
    ($holds:expr, $($what:tt)+) => {
        if !$holds {
            return Err(format!($($what)+));
        }
    };
}

pub fn text(error: leasehold::Error) -> Effect {
    error.to_string()
}

impl Trial {
    fn client(&self) -> Result<Client, Effect> {
        steady(&self.url).ttl(LONG_TTL).build().map_err(text)
    }

    fn recorded(&self) -> Result<(Client, Arc<Recorder>), Effect> {
        let recorder = Recorder::new();
        let builder = steady(&self.url).ttl(LONG_TTL);
        let client = builder.event_handler(Arc::clone(&recorder)).build();
        Ok((client.map_err(text)?, recorder))
    }
}

/// Each trial with the features that it needs. The test drops the rights of the first feature one by one.
#[expect(clippy::type_complexity, reason = "it is the table")]
const TRIALS: &[(&[&str], fn(&Trial) -> Result<(), Effect>)] = &[
    (&["locks"], use_locks),
    (&["shares", "locks"], share_permits),
    (&["plain-acquires", "locks"], acquire_without_a_script),
    (&["plain-releases", "locks"], release_without_a_script),
    (&["script-cache", "locks"], connect_again),
    (
        &[
            "notifications",
            "locks",
            "plain-acquires",
            "plain-releases",
            "script-cache",
            "names",
        ],
        be_notified,
    ),
    (&["names", "locks"], name_connections),
    (&["fenced-values"], use_fenced_values),
    (
        &[
            "transactions",
            "locks",
            "plain-acquires",
            "plain-releases",
            "script-cache",
            "names",
        ],
        write_in_transactions,
    ),
    (&["replicas", "locks"], wait_for_replicas),
    (&["python-redis-lock", "locks"], wake_python),
    (&["redisson"], lock_beside_redisson),
    (&["inspect"], inspect),
    (&["list", "inspect"], list),
    (&["ping", "locks"], ping),
    (
        &["environment-check", "locks", "script-cache"],
        check_environment,
    ),
    (&["database", "locks"], use_another_database),
];

pub fn unlocked(guard: leasehold::MutexGuard) -> Result<(), Effect> {
    match guard.unlock().map_err(text)? {
        Released::Unconfirmed(error) => Err(text(error)),
        _ => Ok(()),
    }
}

fn use_locks(trial: &Trial) -> Result<(), Effect> {
    let server = &trial.server;
    let (first, second) = (trial.client()?, trial.client()?);
    // A lock passes to waiters, one of which gives up.
    let guard = first.mutex("k").lock().map_err(text)?;
    expect!(
        second.mutex("k").try_lock().map_err(text)?.is_none(),
        "granted twice"
    );
    let tasks = [&second, &trial.client()?].map(|client| {
        let mutex = client.mutex("k");
        Task::start(move || {
            let guard = mutex.lock().map_err(text)?;
            guard.extend(secs(70)).map_err(text)?;
            unlocked(guard)
        })
    });
    let queued_two = eventually(secs(2), || queued(server, "k") == 2);
    let hasty = trial.client()?;
    // Long enough to join the queue of a busy server.
    let given_up = hasty.mutex("k").try_lock_for(secs(1));
    expect!(given_up.map_err(text)?.is_none(), "granted twice");
    expect!(
        eventually(secs(2), || queued(server, "k") == 2),
        "an entry stays"
    );
    unlocked(guard)?;
    for task in tasks {
        task.within(SOON, "a waiter")?;
    }
    expect!(queued_two, "not queued");
    // A ticket, and a lock that is taken away.
    let guard = first.mutex("k").lock().map_err(text)?;
    let ticket = guard.into_ticket().map_err(text)?;
    let _guard = second.adopt(&ticket).map_err(text)?;
    let taken = first.mutex("k").force_unlock().map_err(text)?;
    expect!(taken.is_some(), "not taken away");
    // Many locks, renewed and released together.
    let (client, recorder) = trial.recorded()?;
    let lock = |n| client.mutex(format!("many:{n}")).ttl(secs(3)).lock();
    let guards: Result<Vec<_>, _> = (0..20).map(lock).collect();
    let guards = guards.map_err(text)?;
    // All renewals become due while the server is stopped, so most of them share a call.
    server.stop();
    std::thread::sleep(millis(1_200));
    server.resume();
    let renewed = || (0..20).all(|n| recorder.count(What::Renewed, &format!("many:{n}")) > 0);
    expect!(eventually(secs(3), renewed), "not renewed");
    drop(guards);
    let left = || {
        let keys = ask(server, &["KEYS", &in_redis("many:*")]);
        matches!(keys, Reply::Array(keys) if keys.is_empty())
    };
    expect!(eventually(millis(1_200), left), "not released at once");
    // Values of other programs, and the type of each.
    ask(server, &["LPUSH", &in_redis("foreign"), "a value"]);
    let error = text(first.mutex("foreign").try_lock().unwrap_err());
    expect!(error.contains("list"), "the type is not named: {error}");
    // The server forgets the scripts.
    ask(server, &["SCRIPT", "FLUSH"]);
    unlocked(first.mutex("k").lock().map_err(text)?)
}

fn share_permits(trial: &Trial) -> Result<(), Effect> {
    let (first, second) = (trial.client()?, trial.client()?);
    let permits = [&first, &second].map(|client| client.semaphore("k", 2).acquire());
    for permit in permits {
        let permit = permit.map_err(text)?;
        permit.extend(secs(70)).map_err(text)?;
        let released = permit.unlock().map_err(text)?;
        expect!(released.is_confirmed(), "not released: {released:?}");
    }
    let writer = first.rw_lock("r").write().map_err(text)?;
    let reader = writer.downgrade().map_err(text)?;
    let writer = reader.try_upgrade().map_err(text)?;
    let writer = writer.map_err(|reader| format!("{reader:?} is not alone"))?;
    unlocked(writer.into_mutex_guard())?;
    // Without `pexpiretime`, scripts use a less exact command, which the caller's test of refusals finds.
    Ok(())
}

fn acquire_without_a_script(trial: &Trial) -> Result<(), Effect> {
    let (client, recorder) = trial.recorded()?;
    // The second acquire on a connection is followed by a probe. Other keys may use another connection.
    for _ in 0..2 {
        unlocked(client.mutex("k").lock().map_err(text)?)?;
    }
    let is_refused = || recorder.count(What::PlainAcquiresRefused, "") > 0;
    let denied = refused(&trial.server);
    let denied: Vec<&String> = denied
        .iter()
        .filter(|name| ["multi", "exec"].contains(&name.as_str()))
        .collect();
    expect!(
        denied.is_empty() && !is_refused(),
        "a script was used: {denied:?}"
    );
    Ok(())
}

/// Nothing to try on a server without such a command.
fn release_without_a_script(trial: &Trial) -> Result<(), Effect> {
    let client = trial.client()?;
    // The connection finds out behind the first two releases which command the server has.
    for _ in 0..3 {
        unlocked(client.mutex("k").lock().map_err(text)?)?;
    }
    for command in commands(&trial.server, &["plain-releases"]) {
        let calls = trial.server.calls(command).unwrap();
        // The probe is a call, too.
        expect!(calls > 1, "no {command}: {:?}", refused(&trial.server));
    }
    Ok(())
}

/// The server has the scripts already, so a connection need not send them again.
fn connect_again(trial: &Trial) -> Result<(), Effect> {
    let server = &trial.server;
    drop(steady(&server.url()).build().unwrap());
    let before = server.calls("script").unwrap_or(0) + server.calls("script|load").unwrap_or(0);
    drop(trial.client()?);
    let after = server.calls("script").unwrap_or(0) + server.calls("script|load").unwrap_or(0);
    // Redis 6.2 counts SCRIPT EXISTS, too.
    expect!(after - before <= 1, "scripts were sent again");
    // The next connection loads them.
    ask(server, &["SCRIPT", "FLUSH"]);
    trial.client().map(drop)
}

fn be_notified(trial: &Trial) -> Result<(), Effect> {
    let (client, recorder) = trial.recorded()?;
    let holder = trial.client()?;
    let guard = holder.mutex("k").lock().map_err(text)?;
    let mutex = client.mutex("k");
    let waiter = Task::start(move || mutex.lock().map_err(text).and_then(unlocked));
    let decided = || {
        recorder.count(What::NotificationsRefused, "") > 0 || notified_clients(&trial.server) == 2
    };
    expect!(eventually(SOON, decided), "neither refused nor subscribed");
    expect!(
        recorder.count(What::NotificationsRefused, "") == 0,
        "refused"
    );
    expect!(
        eventually(secs(2), || queued(&trial.server, "k") == 1),
        "not queued"
    );
    unlocked(guard)?;
    waiter.within(SOON, "the waiter")?;
    let denied = refused(&trial.server);
    expect!(denied.is_empty(), "refused: {denied:?}");
    Ok(())
}

fn name_connections(trial: &Trial) -> Result<(), Effect> {
    let client = trial.client()?;
    let _guard = client.mutex("k").lock().map_err(text)?;
    let list = ask(&trial.server, &["CLIENT", "LIST"]);
    let list = list.as_text().unwrap();
    expect!(list.contains(" name=leasehold:"), "no name");
    let knows_info = version(&trial.server) >= (7, 2);
    expect!(
        !knows_info || list.contains("lib-name=leasehold"),
        "no library"
    );
    Ok(())
}

fn use_fenced_values(trial: &Trial) -> Result<(), Effect> {
    let client = trial.client()?;
    let value = client.fenced_value("v");
    let token = 1 << 50;
    value.write(token, "x").map_err(text)?;
    let read = value.read().map_err(text)?;
    expect!(read.as_deref() == Some(b"x".as_slice()), "not written");
    value
        .clone()
        .ttl(secs(60))
        .write(token, "y")
        .map_err(text)?;
    value.delete(token + 1).map_err(text)?;
    ask(
        &trial.server,
        &["SET", &in_redis("~value:foreign"), "a value"],
    );
    let error = client.fenced_value("foreign").write(token, "x");
    let error = text(error.unwrap_err());
    expect!(error.contains("string"), "the type is not named: {error}");
    ask(&trial.server, &["SCRIPT", "FLUSH"]);
    value.write(token + 1, "z").map_err(text)
}

fn write_in_transactions(trial: &Trial) -> Result<(), Effect> {
    let client = trial.client()?;
    let guard = client.mutex("k").lock().map_err(text)?;
    for _ in 0..2 {
        let committed = guard.transaction(|_, pipe| {
            pipe.set("data", "x");
            Ok(())
        });
        committed.map_err(text)?;
    }
    // A closure that fails leaves a connection that watches keys.
    let failed = guard.transaction(|_, _| {
        let error = (leasehold::redis::ErrorKind::Client, "the closure fails");
        Err::<(), _>(error.into())
    });
    expect!(failed.is_err(), "the closure fails");
    // If the machine is busy, the lock is held for long enough to be tracked. This user may not track keys.
    let tracking = commands(&trial.server, &["notifications"]);
    let mut denied = refused(&trial.server);
    denied.retain(|object| !tracking.contains(&object.as_str()));
    expect!(denied.is_empty(), "refused: {denied:?}");
    unlocked(guard)
}

/// The server has no replica, so no grant is acknowledged.
fn wait_for_replicas(trial: &Trial) -> Result<(), Effect> {
    let client = steady(&trial.url).replicas(1, millis(50)).build();
    let mutex = client.map_err(text)?.mutex("k");
    let error = mutex.try_lock().map(drop).unwrap_err();
    expect!(error.kind() == ErrorKind::Unavailable, "{error}");
    Ok(())
}

/// The keys of python-redis-lock do not begin with the prefix of the other trials.
fn wake_python(trial: &Trial) -> Result<(), Effect> {
    let server = &trial.server;
    let keys = ["~lock:*", "~lock-signal:*", "&lock:~to:*"];
    ask(
        server,
        &[&["ACL", "SETUSER", "limited"][..], &keys].concat(),
    );
    let before = server.calls("lpush").unwrap();
    let builder = steady(&trial.url).compatible_with(OtherLibrary::PythonRedisLock);
    let client = builder.ttl(LONG_TTL).build().map_err(text)?;
    unlocked(client.mutex("k").lock().map_err(text)?)?;
    let pushed = server.calls("lpush").unwrap() - before;
    expect!(pushed == 1, "no signal");
    Ok(())
}

fn lock_beside_redisson(trial: &Trial) -> Result<(), Effect> {
    for fenced in [true, false] {
        let client = || {
            let builder = steady(&trial.url).ttl(secs(2)).prefix("leasehold:");
            let builder = builder.compatible_with(OtherLibrary::Redisson { fenced });
            builder.build().map_err(text)
        };
        let (client, other) = (client()?, client()?);
        let guard = client.mutex("k").lock().map_err(text)?;
        let wait = other.mutex("k").try_lock_for(secs(1)).map_err(text)?;
        expect!(wait.is_none(), "granted twice");
        expect!(other.mutex("k").is_locked().map_err(text)?, "not found");
        guard.check().map_err(text)?;
        unlocked(guard)?;
        // A lock of Redisson, which the type names.
        ask(&trial.server, &["HSET", &in_redis("k"), "java:1", "1"]);
        expect!(
            other.mutex("k").try_lock().map_err(text)?.is_none(),
            "granted twice"
        );
        ask(&trial.server, &["DEL", &in_redis("k")]);
        ask(&trial.server, &["SCRIPT", "FLUSH"]);
        unlocked(client.mutex("k").lock().map_err(text)?)?;
    }
    Ok(())
}

fn inspect(trial: &Trial) -> Result<(), Effect> {
    let holder = steady(&trial.server.url()).ttl(LONG_TTL).build().unwrap();
    let guard = holder.mutex("k").lock().unwrap();
    let other = steady(&trial.server.url()).build().unwrap();
    let waiter = Task::start(move || drop(other.mutex("k").lock().unwrap()));
    assert!(eventually(SOON, || queued(&trial.server, "k") == 1));
    let permit = holder.semaphore("permits", 2).acquire().unwrap();
    let found = inspect_with(trial);
    drop((guard, permit));
    waiter.within(SOON, "the waiter");
    found
}

fn inspect_with(trial: &Trial) -> Result<(), Effect> {
    let client = trial.client()?;
    let found = client.mutex("k").inspect().map_err(text)?;
    let found = found.ok_or("not found")?;
    expect!(found.clients_waiting() == 1, "the waiter is not counted");
    expect!(!client.mutex("free").is_locked().map_err(text)?, "found");
    let permits = client.semaphore("permits", 2).inspect().map_err(text)?;
    expect!(permits.holders().len() == 1, "not listed: {permits:?}");
    expect!(permits.taken() == 1, "not counted: {permits:?}");
    ask(&trial.server, &["LPUSH", &in_redis("foreign"), "a value"]);
    let error = text(client.mutex("foreign").inspect().unwrap_err());
    expect!(error.contains("list"), "the type is not named: {error}");
    ask(&trial.server, &["SCRIPT", "FLUSH"]);
    client.mutex("k").inspect().map(drop).map_err(text)
}

fn list(trial: &Trial) -> Result<(), Effect> {
    inspect(trial)?;
    let mut locks = trial.client()?.locks("");
    locks.try_for_each(|found| found.map(drop).map_err(text))
}

fn ping(trial: &Trial) -> Result<(), Effect> {
    trial.client()?.ping().map(drop).map_err(text)
}

fn check_environment(trial: &Trial) -> Result<(), Effect> {
    let found = trial.client()?.check_environment().map_err(text)?;
    for finding in found {
        let is_refused_command =
            matches!(finding.warning(), EnvironmentWarning::CommandRefused { .. });
        expect!(!is_refused_command, "{finding}");
    }
    Ok(())
}

fn use_another_database(trial: &Trial) -> Result<(), Effect> {
    let client = steady(&format!("{}/3", trial.url)).build().map_err(text)?;
    unlocked(client.mutex("k").lock().map_err(text)?)
}

/// Runs a trial with the rights of its features, except the right to `dropped`.
fn run(
    names: &[&str],
    dropped: Option<&str>,
    trial: fn(&Trial) -> Result<(), Effect>,
) -> Result<(), Effect> {
    let server = server();
    let mut commands = commands(&server, names);
    commands.retain(|command| Some(*command) != dropped);
    let more: &[&str] = match names[0] {
        "transactions" => &["~data"],
        "redisson" => &["~redisson_lock_*", "&redisson_lock__channel:*"],
        _ => &[],
    };
    let url = create_limited_user(&server, &commands, more);
    let tried = Trial { server, url };
    trial(&tried)?;
    // Without some rights, the queue is less fair, or a call takes more requests: the server reports the refusal.
    let refused = refused(&tried.server);
    expect!(
        dropped.is_none_or(|dropped| !refused.iter().any(|name| name == dropped)),
        "refused"
    );
    Ok(())
}

#[test]
fn each_feature_works_with_its_rights() {
    for (names, trial) in TRIALS {
        run(names, None, *trial).unwrap_or_else(|effect| panic!("{names:?}: {effect}"));
    }
}

/// The trials mostly wait, so several run at a time.
#[test]
fn each_right_is_needed() {
    let server = server();
    let pairs = TRIALS.iter().flat_map(|(names, trial)| {
        let dropped = commands(&server, &names[..1]);
        dropped.into_iter().map(|command| (*names, command, *trial))
    });
    let pairs = Mutex::new(pairs.collect::<Vec<_>>().into_iter());
    let missing_effects = Mutex::new(Vec::new());
    let next = || pairs.lock().unwrap().next();
    let try_without_rights = || {
        while let Some((names, command, trial)) = next() {
            match run(names, Some(command), trial) {
                Err(effect) => println!("{names:?} without {command}: {effect}"),
                Ok(()) => {
                    let needless = format!("{}: {command}", names[0]);
                    missing_effects.lock().unwrap().push(needless);
                }
            }
        }
    };
    std::thread::scope(|scope| {
        (0..8).for_each(|_| drop(scope.spawn(try_without_rights)));
    });
    let missing_effects = missing_effects.into_inner().unwrap();
    assert!(
        missing_effects.is_empty(),
        "not needed: {missing_effects:?}"
    );
}

#[test]
fn without_plain_releases_scripts_release_all_locks() {
    let server = server();
    let features = ["locks", "plain-acquires", "script-cache", "names"];
    let url = create_limited_user(&server, &commands(&server, &features), &[]);
    let client = steady(&url).build().unwrap();
    let mutex = client.mutex("k");
    for _ in 0..3 {
        // Each round has other connections.
        ask(&server, &["CLIENT", "KILL", "TYPE", "normal"]);
        for _ in 0..4 {
            mutex.lock().unwrap().unlock().unwrap();
            let key = ask(&server, &["EXISTS", &in_redis("k")]);
            assert_eq!(key.as_int(), Some(0));
        }
    }
    // The first connection has noted the refusal for the others.
    let plain = commands(&server, &["plain-releases"]);
    let once: Vec<(String, i64)> = plain.iter().map(|it| ((*it).to_owned(), 1)).collect();
    assert_eq!(refusals(&server), once);
}

/// A server refuses a whole rule with a command that it does not know.
#[test]
fn a_server_accepts_the_commands_that_it_knows() {
    let server = server();
    let product = product(&server);
    // Redis 6.2 accepts any name of a subcommand.
    let is_old = version(&server) < (7, 0);
    for right in rights::FEATURES.iter().flat_map(|it| it.commands) {
        let rule = format!("+{}", right.command);
        let reply = server.command(&["ACL", "SETUSER", "other", &rule]).unwrap();
        let is_accepted = !matches!(reply, Reply::Error(_));
        let wanted = right.is_known_to(product) || (is_old && rule.contains('|'));
        assert_eq!(is_accepted, wanted, "{rule} on {product:?}: {reply}");
    }
}

#[test]
fn each_feature_has_a_trial() {
    let tried = TRIALS.iter().map(|(names, _)| names[0]);
    let on_cluster = crate::cluster::rights::TRIALS;
    let tried: Vec<&str> = tried
        .chain(on_cluster.iter().map(|(name, _)| *name))
        .collect();
    let all: Vec<&str> = rights::FEATURES
        .iter()
        .map(|feature| feature.name)
        .collect();
    assert_eq!(sorted(tried), sorted(all));
}

fn sorted(mut names: Vec<&str>) -> Vec<&str> {
    names.sort_unstable();
    names
}
