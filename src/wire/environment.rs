//! The environment check of one server: its queries, and what the replies mean. The check opens a connection of its
//! own and sends all queries together, after the login. It loads one script, and changes nothing else on the server. It
//! then connects again a few times, and compares the `run_id`s of the servers that it reaches.

use std::time::Duration;

use redis::{ConnectionInfo, Pipeline, ProtocolVersion, ServerError, Value};

use crate::command::renew;
use crate::config::key::fence_counter;
use crate::report::environment::{EnvironmentFinding, EnvironmentWarning};
use crate::report::error::{Error, ErrorKind};
use crate::util::clock::MonotonicTime;
use crate::util::slot::Redirect;
use crate::util::text::printable;
use crate::wire::connect::connection::{LONGEST_REPLY, password_to_hide};
use crate::wire::connect::data_check::DataCheck;
use crate::wire::connect::errors::{Announcer, ConnectErrors, NOT_REDIS};
use crate::wire::connect::handshake::Login;
use crate::wire::connect::steps::Step;
use crate::wire::connect::url;
use crate::wire::endpoint::Endpoint;
use crate::wire::net::error_replies::{hide_password, is_error, sanitized};
use crate::wire::net::refusal::name_of;
use crate::wire::net::replies::field;
use crate::wire::net::socket::{Receiver, Sender, Sockets};

/// The most bytes of a server's text in a finding.
const LONGEST_TEXT: usize = 200;

/// The sockets of a check that is under way. The end of the client closes them, which ends the check.
#[derive(Default)]
pub struct EnvironmentCheck(Sockets);

impl EnvironmentCheck {
    /// Ends the checks that are under way, and all later checks.
    pub fn stop(&self) {
        self.0.close();
    }

    /// Connects and asks the server, within `timeout` (`command_timeout`). Then connects again a few times, within
    /// another `timeout`, to find out whether the address leads to several servers.
    pub fn run(
        &self,
        endpoint: &Endpoint,
        timeout: Duration,
    ) -> Result<Vec<EnvironmentFinding>, Error> {
        let deadline = MonotonicTime::now().after(timeout);
        let found = endpoint.find_server(deadline, &self.0)?;
        let (server, named_by) = (found.info, found.named_by);
        let attempt = Attempt {
            check: self,
            endpoint,
            timeout,
            announcer: endpoint.announcer(named_by.as_ref()),
        };
        let socket = attempt.connect(&server, deadline)?;
        // All connections of the check use one login, since the user's callback may be slow.
        let (info, deadline) = endpoint.with_login(server, deadline)?;
        let attempted = attempt.attempted(&info);
        let queries = Queries::new(endpoint, attempted);
        let replies = attempt.ask(&info, socket, &queries.commands, deadline)?;
        let (mut warnings, run_id) = queries.read(attempted, replies)?;
        if endpoint.is_in_cluster {
            warnings.retain(|warning| *warning != EnvironmentWarning::ClusterNode);
        }
        if let Some(run_id) = run_id {
            warnings.extend(attempt.find_several_servers(&info, run_id));
        }
        let address = url::address(&info);
        let finding = |warning| EnvironmentFinding::new(&address, warning);
        Ok(warnings.into_iter().map(finding).collect())
    }
}

/// The greatest number of connections of a check to one address. If a balancer chooses at random between two servers, 1
/// of 128 checks reaches only one server, and 6 of 100 checks reach both too rarely for [`RunIds`].
const MOST_CONNECTIONS: usize = 8;

/// A check of one address.
struct Attempt<'a> {
    check: &'a EnvironmentCheck,
    endpoint: &'a Endpoint,
    timeout: Duration,
    announcer: Option<Announcer<'a>>,
}

impl Attempt<'_> {
    fn attempted<'b>(&'b self, info: &'b ConnectionInfo) -> ConnectErrors<'b> {
        let attempted = ConnectErrors::new(
            info,
            self.timeout,
            "`command_timeout`",
            self.endpoint.dialer.prefix(),
        );
        attempted.announced_by(self.announcer)
    }

    fn connect(
        &self,
        info: &ConnectionInfo,
        deadline: MonotonicTime,
    ) -> Result<(Sender, Receiver), Error> {
        let register = |socket| self.check.0.register(socket);
        let attempted = self.attempted(info);
        self.endpoint.connect(attempted, deadline, register)
    }

    /// Sends the commands, and returns their replies.
    fn ask(
        &self,
        info: &ConnectionInfo,
        (mut sender, mut receiver): (Sender, Receiver),
        commands: &Pipeline,
        deadline: MonotonicTime,
    ) -> Result<Vec<Value>, Error> {
        let (attempted, step) = (self.attempted(info), Step::CheckEnvironment);
        let sent = sender.send(&commands.get_packed_pipeline(), deadline);
        sent.map_err(|error| attempted.no_reply_error(step, None, error.into(), &[]))?;
        let mut replies = Vec::with_capacity(commands.len());
        for command in commands.cmd_iter() {
            let received = receiver.receive(deadline, LONGEST_REPLY);
            let mut reply = received.map_err(|error| {
                let tls = self.endpoint.dialer.tls_error(attempted, &receiver);
                let command = name_of(command);
                let received = receiver.unparsed();
                tls.unwrap_or_else(|| {
                    attempted.no_reply_error(step, Some(&command), error, received)
                })
            })?;
            if let Some(password) = password_to_hide(info) {
                hide_password(&mut reply, &password);
            }
            replies.push(reply);
        }
        sender.closer().close();
        Ok(replies)
    }

    /// Connects to the same address again, until the `run_id`s of the servers show that there are several, or
    /// [`MOST_CONNECTIONS`] were made. An attempt that fails ends the search without a finding.
    fn find_several_servers(
        &self,
        info: &ConnectionInfo,
        first: String,
    ) -> Option<EnvironmentWarning> {
        let deadline = MonotonicTime::now().after(self.timeout);
        let settings = info.redis_settings().clone().set_db(0);
        let mut commands = Login::new(&settings, ProtocolVersion::RESP2, None).commands;
        commands.cmd("INFO").arg("server");
        let mut run_ids = RunIds::default();
        run_ids.add(first);
        for _ in 1..MOST_CONNECTIONS {
            let socket = self.connect(info, deadline).ok()?;
            let replies = self.ask(info, socket, &commands, deadline).ok()?;
            if run_ids.add(info_field(replies.last()?, "run_id")?) {
                let run_ids = run_ids.seen;
                return Some(EnvironmentWarning::SeveralServers { run_ids });
            }
        }
        None
    }
}

/// The `run_id`s of the servers that connections have reached, in the order of the connections. A restarted server has
/// a new `run_id`.
#[derive(Default)]
struct RunIds {
    seen: Vec<String>,
    last: String,
}

impl RunIds {
    /// Adds the `run_id` of the next connection. Returns true if it was seen before and another one came in between:
    /// connections reach two servers in turn. After a restart or a fail-over, the old `run_id` does not come again.
    fn add(&mut self, run_id: String) -> bool {
        let is_known = self.seen.contains(&run_id);
        let has_come_again = is_known && self.last != run_id;
        if !is_known {
            self.seen.push(run_id.clone());
        }
        self.last = run_id;
        has_come_again
    }
}

/// The commands of a check.
struct Queries {
    commands: Pipeline,
    authenticates: bool,
    /// Whether the server is a node of a quorum that has to keep its data. The last query is then about `appendfsync`.
    keeps_data: bool,
}

impl Queries {
    fn new(endpoint: &Endpoint, attempted: ConnectErrors<'_>) -> Self {
        // With RESP2, all servers send these replies in one form. The check needs no database.
        let settings = attempted.info.redis_settings().clone().set_db(0);
        let login = Login::new(&settings, ProtocolVersion::RESP2, None);
        let mut commands = login.commands;
        let authenticates = !commands.is_empty();
        let name = endpoint.dialer.connection_name("leasehold");
        commands.cmd("CLIENT").arg("SETNAME").arg(name);
        commands.cmd("HELLO");
        commands.cmd("INFO");
        // Redis 6.2 takes one name in a call of `CONFIG GET`.
        commands.cmd("CONFIG").arg("GET").arg("save");
        commands
            .cmd("CONFIG")
            .arg("GET")
            .arg("tracking-table-max-keys");
        // A short script: Redis closes a connection that sends an argument of more than 16 KB before it has logged in.
        let script = renew::SCRIPT.text();
        commands.cmd("SCRIPT").arg("LOAD").arg(script);
        let key = fence_counter(endpoint.dialer.prefix());
        commands.cmd("EVAL").arg("return 1").arg(1).arg(key);
        let keeps_data = endpoint
            .data_check
            .as_ref()
            .is_some_and(DataCheck::keeps_data);
        if keeps_data {
            commands.cmd("CONFIG").arg("GET").arg("appendfsync");
        }
        Self {
            commands,
            authenticates,
            keeps_data,
        }
    }

    /// The warnings, and the `run_id` of the server.
    fn read(
        &self,
        attempted: ConnectErrors<'_>,
        replies: Vec<Value>,
    ) -> Result<(Vec<EnvironmentWarning>, Option<String>), Error> {
        let mut replies = replies.into_iter();
        if self.authenticates
            && let Some(Value::ServerError(error)) = replies.next()
        {
            return Err(attempted.refused_error(Step::CheckEnvironment, "AUTH", &error));
        }
        let mut next = || replies.next().unwrap_or_default();
        let _name = next();
        let (hello, info) = (next(), next());
        for reply in [&hello, &info] {
            if let Value::ServerError(error) = reply
                && error.code() == "NOAUTH"
            {
                return Err(attempted.refused_error(Step::CheckEnvironment, "HELLO", error));
            }
        }
        let (save, tracking) = (next(), next());
        let (load, eval) = (next(), next());
        let fsync = self.keeps_data.then(next);
        let is_redis = |reply: &Value| matches!(reply, Value::Array(_) | Value::BulkString(_));
        if ![&hello, &info]
            .into_iter()
            .all(|reply| is_redis(reply) || is_error(reply))
        {
            return Err(attempted.about(ErrorKind::Protocol, NOT_REDIS));
        }
        let run_id = info_field(&info, "run_id");
        let warnings = warnings(&Answers {
            hello,
            info,
            save,
            tracking,
            load,
            eval,
            fsync,
        });
        // Other warnings do not apply to a sentinel.
        let is_sentinel = warnings.contains(&EnvironmentWarning::Sentinel);
        Ok((warnings, run_id.filter(|_| !is_sentinel)))
    }
}

/// The replies to the queries. Each may be an error.
struct Answers {
    hello: Value,
    info: Value,
    save: Value,
    tracking: Value,
    /// The reply to `SCRIPT LOAD`.
    load: Value,
    eval: Value,
    /// `None` unless the server is a node of a quorum that has to keep its data.
    fsync: Option<Value>,
}

fn warnings(answers: &Answers) -> Vec<EnvironmentWarning> {
    let hello = |name: &str| pair(&answers.hello, name);
    let info = |name: &str| info_field(&answers.info, name);
    let mode = hello("mode").or_else(|| info("redis_mode"));
    if mode.as_deref() == Some("sentinel") {
        // A Sentinel knows neither scripts nor most settings.
        return vec![EnvironmentWarning::Sentinel];
    }
    let mut found = Vec::new();
    if mode.as_deref() == Some("cluster") {
        found.push(EnvironmentWarning::ClusterNode);
    }
    let refused = |reply: &Value| match reply {
        Value::ServerError(error) => Some(error.clone()),
        _ => None,
    };
    // A redirect is no refusal: another node of the Cluster may have the key.
    let eval = refused(&answers.eval);
    let eval =
        eval.filter(|error| Redirect::parse(error.code(), error.details().unwrap_or("")).is_none());
    match (refused(&answers.load), eval) {
        (Some(_), Some(eval)) => {
            let reply = shown(&eval);
            found.push(EnvironmentWarning::NoScripts { reply });
        }
        (Some(error), None) => found.push(command_refused("SCRIPT LOAD", &error)),
        (None, Some(error)) => found.push(command_refused("EVAL", &error)),
        (None, None) => {}
    }
    let valkey = || Some(("valkey".to_owned(), info("valkey_version")?));
    let redis = || Some(("redis".to_owned(), info("redis_version")?));
    let by_hello = hello("server").zip(hello("version"));
    if let Some((name, version)) = by_hello.or_else(valkey).or_else(redis) {
        found.extend(EnvironmentWarning::from_version(&name, &version));
    } else if let Value::ServerError(error) = &answers.hello {
        found.push(command_refused("HELLO", error));
    }
    if hello("role").as_deref() == Some("replica") || info("role").as_deref() == Some("slave") {
        let primary = info("master_host").zip(info("master_port"));
        let primary = primary.map(|(host, port)| format!("{host}:{port}"));
        found.push(EnvironmentWarning::Replica { primary });
    }
    let save = pair(&answers.save, "save");
    match &answers.info {
        Value::ServerError(error) => found.push(command_refused("INFO", error)),
        _ => {
            let number = |name| info(name).and_then(|text| text.parse::<u64>().ok());
            if let Some(policy) = info("maxmemory_policy")
                && policy != "noeviction"
            {
                let max_memory = number("maxmemory").unwrap_or(0);
                found.push(EnvironmentWarning::Eviction { policy, max_memory });
            }
            let is_off = number("aof_enabled") == Some(0);
            if let Some(fsync) = &answers.fsync {
                found.extend(data_loss(is_off, fsync));
            } else if is_off {
                let has_snapshots = save.map(|save| !save.is_empty());
                found.push(EnvironmentWarning::Persistence { has_snapshots });
            }
        }
    }
    let max_keys = pair(&answers.tracking, "tracking-table-max-keys");
    if let Some(max_keys) = max_keys.and_then(|text| text.parse().ok()) {
        let tracked = info("tracking_total_keys").and_then(|text| text.parse().ok());
        found.extend(EnvironmentWarning::from_tracking(
            max_keys,
            tracked.unwrap_or(0),
        ));
    }
    if let Value::ServerError(error) = &answers.tracking {
        found.push(command_refused("CONFIG GET", error));
    }
    found
}

/// The warning about a setting that loses data, on a node of a quorum that has to keep its data.
fn data_loss(is_off: bool, fsync: &Value) -> Option<EnvironmentWarning> {
    let (setting, value) = match (pair(fsync, "appendfsync"), fsync) {
        _ if is_off => ("appendonly", "no".to_owned()),
        (Some(fsync), _) if fsync != "always" => ("appendfsync", fsync),
        (_, Value::ServerError(error)) => {
            return Some(command_refused("CONFIG GET appendfsync", error));
        }
        _ => return None,
    };
    Some(EnvironmentWarning::LosesData { setting, value })
}

fn command_refused(command: &'static str, error: &ServerError) -> EnvironmentWarning {
    let reply = shown(error);
    EnvironmentWarning::CommandRefused { command, reply }
}

/// The text of an error reply, on one line and short.
fn shown(error: &ServerError) -> String {
    let error = sanitized(error.clone().into());
    let text = match (error.code(), error.detail()) {
        (Some(code), Some(detail)) => format!("{code} {detail}"),
        (Some(code), None) => code.to_owned(),
        _ => error.to_string(),
    };
    printable(text.trim_end(), LONGEST_TEXT).into_owned()
}

/// The text of a field of `INFO`.
fn info_field(info: &Value, name: &str) -> Option<String> {
    let Value::BulkString(text) = info else {
        return None;
    };
    let text = String::from_utf8_lossy(text);
    let mut lines = text.lines();
    let found = lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    found.map(|value| printable(value.trim_end(), LONGEST_TEXT).into_owned())
}

/// The text of the field `name` of a reply.
fn pair(reply: &Value, name: &str) -> Option<String> {
    let text = String::from_utf8_lossy(field(reply, name.as_bytes())?);
    Some(printable(&text, LONGEST_TEXT).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_comes_again_is_one_of_several() {
        for (reached, are_several) in [
            ("AAAAAAAA", false),
            // A restart or a fail-over.
            ("AAABBBBB", false),
            ("ABCCCCCC", false),
            ("ABA", true),
            ("AABBBBA", true),
            ("ABCB", true),
        ] {
            let mut run_ids = RunIds::default();
            let found = reached.chars().any(|id| run_ids.add(id.to_string()));
            assert_eq!(found, are_several, "{reached}");
        }
    }
}
