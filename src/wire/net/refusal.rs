//! A table of the reasons for which a server refuses a command, with the text and the next step for each reason.

use std::collections::BTreeSet;

use redis::{Arg, Cmd, ServerError, Value};

use crate::command::script::Script;
use crate::report::error::{Error, ErrorKind};
use crate::util::slot::Redirect;
use crate::wire::net::error_replies::{
    code_and_detail, error_reply, is_denied_in_script, is_redis_code, server_text, unexpected_reply,
};

/// The reason for which an error reply refuses a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The server or a proxy does not know the command, or forbids it to all users.
    UnknownCommand,
    /// The ACL rule of the user lacks the command.
    Command,
    /// The ACL rule of the user lacks a pattern that matches a key of the command.
    Key,
    /// The ACL rule of the user lacks a pattern that matches the channel of the command.
    Channel,
}

/// Parts of the texts by which Redis, Valkey and proxies refuse a command to all users, in lower case.
const UNKNOWN: [&str; 8] = [
    "unknown command",
    "unknown subcommand",
    // From a script.
    "unknown redis command",
    "unsupported command",
    "not support",
    "is not allowed",
    "is disabled",
    "is forbidden",
];

impl Refusal {
    /// Returns the reason, or `None` if the error has another cause. [`code_and_detail`] returns `code` and `detail`.
    pub fn of(code: &str, detail: &str) -> Option<Self> {
        if code == "NOPERM" || is_denied_in_script(detail) {
            // The texts differ between 6.2, 7.0 and 7.2. Commands come first, since a command can be named `keys`.
            let has = |part| detail.contains(part);
            return Some(match () {
                () if has("to run the") || has("can't run") => Self::Command,
                () if has("channel") => Self::Channel,
                () if has("key") => Self::Key,
                () => Self::Command,
            });
        }
        if code != "ERR" && is_redis_code(code) {
            return None;
        }
        let text = format!("{code} {detail}").to_ascii_lowercase();
        let is_unknown = UNKNOWN.iter().any(|part| text.contains(part));
        is_unknown.then_some(Self::UnknownCommand)
    }

    /// The part of `command` that the ACL denies, as the end of `does not allow the user ..`.
    pub fn denied(self, command: &str) -> String {
        match self {
            Self::Key => format!("the key of {command}"),
            Self::Channel => format!("the channel of {command}"),
            _ => format!("to call {command}"),
        }
    }

    /// The next step after the refusal of `command`. `prefix` is the prefix of the client's keys.
    pub fn next_step(self, command: &str, prefix: &str) -> String {
        match self {
            Self::UnknownCommand => ENABLE.to_owned(),
            Self::Command => add_to_rule(&format!("+{}", right_to(command))),
            Self::Key => add_to_rule(&format!("~{prefix}*")),
            Self::Channel => add_to_rule(&format!("&{prefix}~to:*")),
        }
    }
}

/// The next step if a server or a proxy does not know a command.
const ENABLE: &str = "enable the command on the server (`rename-command`, or the provider's list), or, if a proxy \
                      answers there, use the URL of the server behind it";

fn add_to_rule(word: &str) -> String {
    format!("add `{word}` to the user's ACL rule (docs/redis.md, Rights)")
}

/// The name of a command in ACL rules: `client|tracking`.
fn right_to(command: &str) -> String {
    command.to_ascii_lowercase().replace(' ', "|")
}

/// Whether this error reply means that a server, a proxy or an ACL has refused the command.
pub fn refuses_command(error: &ServerError) -> bool {
    let (code, detail) = code_and_detail(error.code(), error.details());
    let refusal = Refusal::of(code, detail);
    matches!(refusal, Some(Refusal::UnknownCommand | Refusal::Command))
}

/// Whether the error refuses `command` by name. The server has then not carried it out.
pub fn is_refused(command: &str, code: &str, detail: &str) -> bool {
    let refusal = Refusal::of(code, detail);
    let is_refused = matches!(refusal, Some(Refusal::UnknownCommand | Refusal::Command));
    let names = |text: &str| text.to_ascii_uppercase().contains(command);
    is_refused && (names(code) || names(detail))
}

/// The error for the error reply to a `command` of this library.
pub fn command_refused(command: &str, (code, detail): (&str, Option<&str>), prefix: &str) -> Error {
    let (code, detail) = code_and_detail(code, detail);
    match Refusal::of(code, detail) {
        Some(refusal) => error(
            refusal,
            command,
            (code, detail),
            &refusal.next_step(command, prefix),
        ),
        None => error_reply(code, Some(detail)),
    }
}

/// The reason why acquires on this server use the script only.
pub fn plain_refused(reply: &Value, address: &str, prefix: &str) -> Error {
    let error = match reply {
        Value::ServerError(error) => {
            let reply = (error.code(), error.details());
            command_refused("a command of MULTI .. EXEC", reply, prefix)
        }
        other => unexpected_reply("EXEC", other),
    };
    error.at(address)
}

/// The error for the error reply to a call of `script`. The server may have refused the call, or a command in
/// the script. Most servers do not name a command in the script, so the error lists them.
pub fn script_refused(
    script: &Script,
    (code, detail): (&str, Option<&str>),
    prefix: &str,
) -> Error {
    let (code, detail) = code_and_detail(code, detail);
    let Some(refusal) = Refusal::of(code, detail) else {
        return error_reply(code, Some(detail));
    };
    let by_name = quoted(detail);
    let commands = || commands_of(script.text()).join(", ");
    let next = match (refusal, by_name) {
        (Refusal::Command, None) => format!(
            "add the command that ACL LOG names to the user's ACL rule: it is one of {}",
            commands().to_lowercase()
        ),
        (Refusal::UnknownCommand, None) => {
            format!(
                "the server has to know {}: see `rename-command`",
                commands()
            )
        }
        (Refusal::Channel, _) if script.layout.redisson => add_to_rule("&redisson_lock__channel:*"),
        (Refusal::Key, _) if script.layout.redisson => {
            add_to_rule(&format!("~{prefix}* ~redisson_lock_*"))
        }
        (refusal, name) => refusal.next_step(name.unwrap_or_default(), prefix),
    };
    let command = format!("the script {}", script.name);
    error(refusal, &command, (code, detail), &next)
}

/// The error for `what`, which the server has refused with this code and detail.
fn error(refusal: Refusal, what: &str, (code, detail): (&str, &str), next: &str) -> Error {
    let kind = match refusal {
        Refusal::UnknownCommand => ErrorKind::Unsupported,
        _ => ErrorKind::Denied,
    };
    let text = server_text(code, detail);
    let error = Error::new(kind, format!("{what} is refused: {text}; {next}"));
    error.with_redirect(Redirect::parse(code, detail))
}

/// The name of a command that the server's text has in quotes.
fn quoted(detail: &str) -> Option<&str> {
    let (_, rest) = detail.split_once(['\'', '`'])?;
    let (name, _) = rest.split_once(['\'', '`'])?;
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '|';
    (!name.is_empty() && name.len() < 32 && name.chars().all(is_name)).then_some(name)
}

/// The name of a command, with that of its subcommand: `CLIENT TRACKING`.
pub fn name_of(command: &Cmd) -> String {
    let words = command.args_iter().filter_map(|word| match word {
        Arg::Simple(word) => std::str::from_utf8(word).ok(),
        _ => None,
    });
    let mut words = words.take(2);
    match (words.next(), words.next()) {
        (Some(name @ ("CLIENT" | "CONFIG" | "SCRIPT")), Some(subcommand)) => {
            format!("{name} {subcommand}")
        }
        (name, _) => name.unwrap_or_default().to_owned(),
    }
}

/// The commands that a script calls, sorted.
fn commands_of(script: &str) -> Vec<&str> {
    let calls = script.split("call('").skip(1);
    let names = calls.filter_map(|call| call.split('\'').next());
    let names: BTreeSet<&str> = names.collect();
    names.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::renew;

    #[test]
    fn each_version_refuses_by_texts_that_are_recognized() {
        use Refusal::{Channel, Command, Key, UnknownCommand};
        let cases = [
            // Redis 6.2.
            (
                "NOPERM this user has no permissions to run the 'script' command or its subcommand",
                Some(Command),
            ),
            (
                "NOPERM this user has no permissions to access one of the keys used as arguments",
                Some(Key),
            ),
            (
                "NOPERM this user has no permissions to access one of the channels used as arguments",
                Some(Channel),
            ),
            (
                "@user_script: 1: The user executing the script can't run this command",
                Some(Command),
            ),
            (
                "@user_script: 1: Unknown Redis command called from Lua script",
                Some(UnknownCommand),
            ),
            (
                "ERR unknown command `SCRIPT`, with args beginning with: `LOAD`, ",
                Some(UnknownCommand),
            ),
            (
                "ERR Unknown subcommand or wrong number of arguments for 'SETINFO'. Try CLIENT HELP.",
                Some(UnknownCommand),
            ),
            // Redis 7.0.
            (
                "NOPERM this user has no permissions to run the 'script|load' command",
                Some(Command),
            ),
            (
                "ERR The user executing the script can't run this command or subcommand",
                Some(Command),
            ),
            (
                "ERR The user executing the script can't access at least one of the keys mentioned in the command arguments",
                Some(Key),
            ),
            (
                "ERR The user executing the script can't publish to the channel mentioned in the command",
                Some(Channel),
            ),
            (
                "ERR unknown subcommand 'SETINFO'. Try CLIENT HELP.",
                Some(UnknownCommand),
            ),
            (
                "ERR Unknown Redis command called from script script: f, on @user_script:1.",
                Some(UnknownCommand),
            ),
            // Redis from 7.2 on, and Valkey.
            (
                "NOPERM User app has no permissions to run the 'keys' command",
                Some(Command),
            ),
            ("NOPERM No permissions to access a key", Some(Key)),
            ("NOPERM No permissions to access a channel", Some(Channel)),
            (
                "NOPERM No permissions to access a channel used as an argument",
                Some(Channel),
            ),
            (
                "ERR ACL failure in script: User key has no permissions to run the 'set' command",
                Some(Command),
            ),
            (
                "ERR ACL failure in script: No permissions to access a key",
                Some(Key),
            ),
            // Proxies and providers.
            ("unsupported command 'script'", Some(UnknownCommand)),
            ("ERR command 'CLIENT' is not allowed", Some(UnknownCommand)),
            ("ERR CLIENT TRACKING is not supported", Some(UnknownCommand)),
            // Other causes.
            (
                "OOM command not allowed when used memory > 'maxmemory'",
                None,
            ),
            (
                "@user_script: 33: -OOM command not allowed when used memory > 'maxmemory'",
                None,
            ),
            ("LOADING Redis is loading the dataset in memory", None),
            ("ERR DB index is out of range", None),
            ("upstream failure", None),
        ];
        for (text, refusal) in cases {
            let (code, detail) = text.split_once(' ').unwrap();
            let (code, detail) = code_and_detail(code, Some(detail));
            assert_eq!(Refusal::of(code, detail), refusal, "{text}");
        }
    }

    #[test]
    fn errors_of_scripts_name_the_command_or_all_of_them() {
        let says = |text: &str| {
            let (code, detail) = text.split_once(' ').unwrap();
            script_refused(&renew::SCRIPT, (code, Some(detail)), "app:").to_string()
        };
        assert_eq!(
            says("NOPERM this user has no permissions to run the 'eval' command"),
            "Redis denies access: the script Renew is refused: NOPERM this user has no permissions to run the 'eval' \
             command; add `+eval` to the user's ACL rule (docs/redis.md, Rights)"
        );
        assert_eq!(
            says("ERR The user executing the script can't run this command or subcommand"),
            "Redis denies access: the script Renew is refused: ERR The user executing the script can't run this \
             command or subcommand; add the command that ACL LOG names to the user's ACL rule: it is one of exists, \
             getrange, mget, pexpire, pexpireat, pexpiretime, pttl, set, time, zadd, zcard, zcount, zrange, zrem, \
             zscore"
        );
        assert_eq!(
            says("ERR Unknown Redis command called from script"),
            "not supported: the script Renew is refused: ERR Unknown Redis command called from script; the server has \
             to know EXISTS, GETRANGE, MGET, PEXPIRE, PEXPIREAT, PEXPIRETIME, PTTL, SET, TIME, ZADD, ZCARD, ZCOUNT, \
             ZRANGE, ZREM, ZSCORE: see `rename-command`"
        );
        let key = says("NOPERM No permissions to access a key");
        assert!(key.contains("; add `~app:*` to"), "{key}");
    }
}
