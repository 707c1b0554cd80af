//! `leasehold acl`: prints the ACL rule of a user. It sends no request. The rights are in `rights`.

pub mod rights;

use std::process::ExitCode;

use serde::Serialize;

use crate::exit::Failure;
use crate::output::{Output, json, line};

use rights::{Feature, Server, Version};

/// The kind of server on which the user is created.
#[derive(Clone, Copy, PartialEq, clap::ValueEnum)]
enum Place {
    /// Redis servers, which store the locks
    Server,
    /// Sentinels
    Sentinel,
}

#[derive(clap::Args)]
pub struct Options {
    /// Where the user is: at the servers, or at the sentinels of a group
    #[arg(long, value_enum, default_value = "server")]
    topology: Place,
    /// The name of the user
    #[arg(long, default_value = "leasehold")]
    user: String,
    /// The prefix of the client, as in Builder::prefix
    #[arg(long, default_value = "leasehold:")]
    prefix: String,
    #[arg(
        long,
        value_name = "FEATURE,..",
        value_delimiter = ',',
        help = format!("The features that the client uses [default: usual]: {}", feature_names())
    )]
    features: Vec<String>,
    /// The oldest server that the rule is for, such as 7.2, redis-8.4 or valkey-9. A server refuses a rule with a
    /// command that it does not know. Redis 7.0 accepts fewer rules than the versions before and after it
    #[arg(long, value_name = "SERVER", default_value = "7.0", value_parser = server)]
    server: Server,
    /// The password's SHA-256 in hexadecimal digits. Without it, the user keeps its passwords
    #[arg(long, value_name = "SHA-256")]
    password_hash: Option<String>,
    /// A line for the file that `aclfile` names, instead of a command for redis-cli
    #[arg(long)]
    aclfile: bool,
    /// List the features and their commands instead
    #[arg(long)]
    list: bool,
    /// More rules, such as those for the commands and keys of transactions: -- +incrby '~account:*'
    #[arg(last = true)]
    more: Vec<String>,
}

/// Reads the value of `--server`. A version without a product is one of Redis.
fn server(text: &str) -> Result<Server, String> {
    let (version, product): (_, fn(Version) -> Server) = match text.split_once('-') {
        Some(("valkey", version)) => (version, Server::Valkey),
        Some(("redis", version)) => (version, Server::Redis),
        _ => (text, Server::Redis),
    };
    let (major, minor) = version.split_once('.').unwrap_or((version, "0"));
    let number = |part: &str| part.parse::<u32>().ok();
    let version = number(major).zip(number(minor)).map(product);
    version.ok_or_else(|| "a server has the form 7.2, redis-8.4 or valkey-9".to_owned())
}

/// The rule, as `--json` prints it.
#[derive(Serialize)]
struct Rule {
    rule: String,
}

pub fn run(options: &Options, output: Output) -> Result<ExitCode, Failure> {
    if options.list {
        let table = match options.topology {
            Place::Server => rights::table(),
            Place::Sentinel => rights::table_at_sentinels(),
        };
        line(table.trim_end());
        return Ok(ExitCode::SUCCESS);
    }
    let rule = rule(options)?;
    match output {
        Output::Text => line(rule),
        Output::Json => json(&Rule { rule }),
    }
    Ok(ExitCode::SUCCESS)
}

/// Fails with a usage error unless `is_valid`.
fn ensure(is_valid: bool, message: impl FnOnce() -> String) -> Result<(), Failure> {
    match is_valid {
        true => Ok(()),
        false => Err(Failure::usage(message())),
    }
}

/// The command for redis-cli, or the line of an aclfile.
fn rule(options: &Options) -> Result<String, Failure> {
    let is_name = !options.user.is_empty() && !options.user.contains(char::is_whitespace);
    ensure(is_name, || {
        format!("a user's name has no blanks: {:?}", options.user)
    })?;
    let rule = match options.topology {
        Place::Server => {
            let features = chosen(&options.features)?;
            rights::rule(
                &options.prefix,
                &rights::commands(&features, options.server),
            )
        }
        Place::Sentinel => {
            ensure(options.features.is_empty(), || {
                "--features is for users at servers; the rule for sentinels is always the same"
                    .to_owned()
            })?;
            let features: Vec<&Feature> = rights::AT_SENTINELS.iter().collect();
            rights::rule_at_sentinels(&rights::commands(&features, options.server))
        }
    };
    let start = match options.aclfile {
        true => "user",
        false => "ACL SETUSER",
    };
    let mut words = vec![format!("{start} {} on", options.user)];
    if let Some(hash) = &options.password_hash {
        let is_hash = hash.len() == 64 && hash.bytes().all(|byte| byte.is_ascii_hexdigit());
        ensure(is_hash, || "a SHA-256 has 64 hexadecimal digits".to_owned())?;
        words.extend(["resetpass".to_owned(), format!("#{}", hash.to_lowercase())]);
    }
    words.extend(rule);
    words.extend(options.more.iter().cloned());
    Ok(words.join(" "))
}

fn chosen(names: &[String]) -> Result<Vec<&'static Feature>, Failure> {
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    match names[..] {
        [] => Ok(rights::usual()),
        _ => rights::features(&names).map_err(|name| {
            let names = feature_names();
            Failure::usage(format!(
                "--features: there is no feature {name:?}; there are {names}"
            ))
        }),
    }
}

/// The values of `--features`.
fn feature_names() -> String {
    let names = rights::FEATURES.iter().map(|feature| feature.name);
    let names: Vec<&str> = names.chain(["usual"]).collect();
    names.join(", ") + ", or all"
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use clap::{CommandFactory as _, Parser};

    use super::*;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        options: Options,
    }

    fn try_printed(arguments: &[&str]) -> Result<String, Failure> {
        let arguments = ["acl"].iter().chain(arguments);
        let parsed = Cli::try_parse_from(arguments).map_err(Failure::usage)?;
        rule(&parsed.options)
    }

    #[track_caller]
    fn printed(arguments: &[&str]) -> String {
        try_printed(arguments).expect("it is valid")
    }

    #[test]
    fn the_docs_have_the_rule_and_the_table() {
        let at_sentinels = printed(&["--topology", "sentinel"]);
        for (page, rule, table) in [
            ("redis.md", printed(&[]), rights::table()),
            ("topologies.md", at_sentinels, rights::table_at_sentinels()),
        ] {
            let path = Path::new(env!("CARGO_MANIFEST_DIR"))
                .join("../../docs")
                .join(page);
            let text = fs::read_to_string(path).expect("it is there");
            for part in [rule, table] {
                assert!(text.contains(&part), "docs/{page} lacks:\n{part}");
            }
        }
    }

    #[test]
    fn a_rule_is_a_command_or_a_line() {
        let rule = printed(&["--features", "ping", "--user", "u", "--prefix", "p:"]);
        let expected = "ACL SETUSER u on resetkeys ~p:* resetchannels &p:~to:* -@all +ping";
        assert_eq!(rule, expected);
        let hash = "A".repeat(64);
        let rule = printed(&[
            "--aclfile",
            "--features",
            "database",
            "--password-hash",
            &hash,
            "--",
            "+incr",
            "~a*",
        ]);
        let expected = format!(
            "user leasehold on resetpass #{} resetkeys ~leasehold:* resetchannels &leasehold:~to:* -@all +select \
             +incr ~a*",
            "a".repeat(64)
        );
        assert_eq!(rule, expected);
    }

    #[test]
    fn prefixes_match_themselves_only() {
        for (prefix, pattern) in [
            ("a*b?[c]\\:", "~a\\*b\\?\\[c\\]\\\\:*"),
            ("a b\"c'", "~a?b?c?*"),
            ("\u{2003}é", "~???é*"),
            ("", "~*"),
        ] {
            assert_eq!(rights::rule(prefix, &[])[1], pattern, "{prefix:?}");
        }
    }

    #[test]
    fn newer_servers_have_more_rules() {
        let names = |server| printed(&["--features", "names", "--server", server]);
        assert!(!names("7.0").contains("setinfo"));
        for server in ["7.2", "8", "valkey-8.0"] {
            assert!(names(server).contains(" +client|setinfo"), "{server}");
        }
        let shards = |server| printed(&["--features", "shard-channels", "--server", server]);
        assert!(!shards("6.2").contains("ssubscribe"));
        assert!(shards("7.0").ends_with(" -@all +pubsub|shardnumsub +spublish +ssubscribe"));
    }

    #[test]
    fn each_product_has_its_own_delete() {
        let deletes = |server| {
            let rule = printed(&["--features", "plain-releases", "--server", server]);
            let (_, commands) = rule.split_once(" -@all").expect("the commands follow");
            commands.to_owned()
        };
        for (server, expected) in [
            ("7.0", ""),
            ("8.3", ""),
            ("8.4", " +delex"),
            ("redis-9", " +delex"),
            ("valkey-8.1", ""),
            ("valkey-9", " +delifeq"),
            ("valkey-10.0", " +delifeq"),
        ] {
            assert_eq!(deletes(server), expected, "{server}");
        }
    }

    #[test]
    fn usual_features_can_be_extended() {
        let rule = printed(&["--features", "usual,cluster"]);
        let usual = printed(&[]);
        assert_eq!(printed(&["--features", "usual"]), usual);
        assert!(
            rule.contains(" +cluster|slots ") && rule.len() > usual.len(),
            "{rule}"
        );
        let all = printed(&["--features", "all"]);
        assert!(
            all.contains(" +select ") && all.contains(" +cluster|slots "),
            "{all}"
        );
    }

    #[test]
    fn the_help_names_all_features() {
        let help = Cli::command().render_long_help().to_string();
        let help: Vec<&str> = help.split_whitespace().collect();
        let help = help.join(" ");
        let names: Vec<&str> = rights::FEATURES
            .iter()
            .map(|feature| feature.name)
            .collect();
        assert!(help.contains(&names.join(", ")), "{help}");
    }

    #[test]
    fn wrong_options_are_refused() {
        for arguments in [
            ["--features", "locks,lock"],
            ["--user", "a b"],
            ["--user", ""],
            ["--password-hash", "secret"],
            ["--server", "seven"],
            ["--server", "keydb-6.3"],
        ] {
            assert!(try_printed(&arguments).is_err(), "{arguments:?}");
        }
        let of_servers = ["--topology", "sentinel", "--features", "locks"];
        assert!(try_printed(&of_servers).is_err());
    }
}
