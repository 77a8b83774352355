//! Check the model of the protocol: `prove [--quick] [--break RULE] [--scenario NAME] [--list]`, or
//! print what can be observed of an add: `prove --traces [--quick] [--break RULE]`.
//!
//! Without `--break`, every scenario must hold, then every rule is broken in turn, in the first
//! scenario that needs it, and a counterexample must be found. See README.md.

mod automaton;
mod bounds;
mod cached;
mod checker;
mod eras;
mod fence;
mod generations;
mod holds;
mod keys;
mod log;
mod names;
mod rules;
mod slices;
mod times;

use std::process::ExitCode;
use std::time::Instant;

use automaton::Automaton;
use checker::{search, Found, Model};
use rules::Rule;

const THREADS: usize = 2;

/// A scenario of one of the models.
struct Scene {
    name: &'static str,
    /// Whether it is small enough for `--quick`.
    quick: bool,
    search: Box<dyn Fn(Option<Rule>) -> Found>,
    situations: Vec<&'static str>,
}

fn scene<M: Model>(name: &'static str, quick: bool, make: impl Fn(Option<Rule>) -> M + 'static) -> Scene {
    let situations = M::SITUATIONS.iter().map(|each| each.0).collect();
    Scene { name, quick, search: Box::new(move |broken| search(&make(broken), THREADS)), situations }
}

fn scenes() -> Vec<Scene> {
    let of_log = log::SCENARIOS.iter();
    let of_log = of_log.map(|each| scene(each.name, each.quick, move |broken| log::Log::new(each, broken)));
    let of_keys = keys::SCENARIOS.iter();
    let of_keys =
        of_keys.map(|each| scene(each.name, true, move |broken| keys::Keys { scenario: each, broken }));
    let of_names = names::SCENARIOS.iter();
    let of_names =
        of_names.map(|each| scene(each.name, true, move |broken| names::Names { scenario: each, broken }));
    let of_eras = eras::SCENARIOS.iter();
    let of_eras =
        of_eras.map(|each| scene(each.name, true, move |broken| eras::Eras { scenario: each, broken }));
    let of_generations = generations::SCENARIOS.iter();
    let of_generations = of_generations.map(|each| {
        scene(each.name, each.quick, move |broken| generations::Generations { scenario: each, broken })
    });
    let of_bounds = bounds::SCENARIOS.iter();
    let of_bounds = of_bounds
        .map(|each| scene(each.name, each.quick, move |broken| bounds::Bounds { scenario: each, broken }));
    let of_holds = holds::SCENARIOS.iter();
    let of_holds = of_holds
        .map(|each| scene(each.name, each.quick, move |broken| holds::Holds { scenario: each, broken }));
    let of_fence = scene("fence", true, |broken| fence::Fence { cancels: 0, broken });
    let of_cancel = scene("fence, cancel", true, |broken| fence::Fence { cancels: 1, broken });
    let of_cancels = scene("fence, two cancels", true, |broken| fence::Fence { cancels: 2, broken });
    let of_cache = scene("cache", true, |broken| cached::Cached { broken });
    let of_slices = scene("late slice", true, |broken| slices::Slices { broken });
    of_log
        .chain(of_keys)
        .chain(of_names)
        .chain(of_eras)
        .chain(of_generations)
        .chain(of_bounds)
        .chain(of_holds)
        .chain([of_slices, of_cache, of_fence, of_cancel, of_cancels])
        .collect()
}

fn scene_of(name: &str) -> Scene {
    scenes().into_iter().find(|each| each.name == name).expect("a scenario's name")
}

/// What the command line asks for.
#[derive(Default)]
struct Asked {
    quick: bool,
    traces: bool,
    broken: Option<Rule>,
    scenario: Option<String>,
}

fn main() -> ExitCode {
    let asked = match asked(std::env::args().skip(1)) {
        Ok(asked) => asked,
        Err(message) => {
            eprintln!("{message}");
            return ExitCode::from(2);
        }
    };
    if asked.traces {
        traces(&asked);
        return ExitCode::SUCCESS;
    }
    let is_right = match asked.broken {
        Some(rule) => show(rule, &asked),
        None => hold(&asked) & catch(&asked),
    };
    ExitCode::from(u8::from(!is_right))
}

fn asked(mut arguments: impl Iterator<Item = String>) -> Result<Asked, String> {
    let mut asked = Asked::default();
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--quick" => asked.quick = true,
            "--traces" => asked.traces = true,
            "--scenario" => {
                let name = arguments.next().unwrap_or_default();
                if !scenes().iter().any(|each| each.name == name) {
                    return Err(format!("no scenario {name:?}; --list shows them"));
                }
                asked.scenario = Some(name);
            }
            "--break" => {
                let name = arguments.next().unwrap_or_default();
                let rule = Rule::by_name(&name);
                asked.broken = Some(rule.ok_or(format!("no rule {name:?}; --list shows them"))?);
            }
            "--list" => {
                let mut names: Vec<_> = rules::ALL.iter().map(|rule| rule.name()).collect();
                names.extend(scenes().iter().map(|each| each.name));
                return Err(names.join("\n"));
            }
            other => {
                return Err(format!("{other:?} is none of --quick, --break, --scenario, --list, --traces"))
            }
        }
    }
    Ok(asked)
}

/// Search every scenario with all rules kept. Returns whether no promise is broken and every
/// situation is reached.
fn hold(asked: &Asked) -> bool {
    println!("| scenario | states | longest path | seconds |\n|---|---|---|---|");
    let mut is_right = true;
    let mut reached: Vec<&str> = Vec::new();
    let mut missing: Vec<&str> = Vec::new();
    let is_asked = |each: &&Scene| match &asked.scenario {
        Some(only) => only == each.name,
        None => !asked.quick || each.quick,
    };
    let scenes = scenes();
    for each in scenes.iter().filter(is_asked) {
        let began = Instant::now();
        let found = (each.search)(None);
        let seconds = began.elapsed().as_secs_f32();
        println!("| {} | {} | {} | {seconds:.1} |", each.name, thousands(found.states), found.depth);
        is_right &= !tell(&found);
        reached.extend(found.situations);
    }
    for name in scenes.iter().flat_map(|each| &each.situations) {
        if !reached.contains(name) && !missing.contains(name) {
            missing.push(name);
        }
    }
    if !missing.is_empty() && asked.scenario.is_none() && !asked.quick {
        println!("NEVER REACHED: {}", missing.join("; "));
        is_right = false;
    }
    is_right
}

/// Break each rule. Returns whether each has a counterexample, or a reason to have none.
fn catch(asked: &Asked) -> bool {
    if asked.scenario.is_some() {
        return true;
    }
    println!("\n| rule | if it is broken | steps | scenario |\n|---|---|---|---|");
    let mut is_right = true;
    for rule in rules::ALL {
        let scenario = scene_of(rule.scenario());
        if asked.quick && !scenario.quick {
            continue;
        }
        let found = (scenario.search)(Some(*rule));
        let steps = match (&found.counterexample, rule.harmless()) {
            (Some(_), None) => found.depth.to_string(),
            (None, Some(why)) => format!("none: {why}"),
            (Some(_), Some(_)) => "NOT HARMLESS".into(),
            (None, None) => "NOT CAUGHT".into(),
        };
        is_right &= !steps.starts_with("NOT");
        println!("| `{}` | {} | {steps} | {} |", rule.name(), rule.broken(), scenario.name);
    }
    is_right
}

/// Show the counterexample of a rule. Returns whether there is one.
fn show(rule: Rule, asked: &Asked) -> bool {
    let scenario = asked.scenario.as_deref().unwrap_or(rule.scenario());
    println!("{}: {}. Scenario: {scenario}", rule.name(), rule.broken());
    let found = (scene_of(scenario).search)(Some(rule));
    println!("{} states", thousands(found.states));
    tell(&found)
}

/// Print the counterexample, if there is one.
fn tell(found: &Found) -> bool {
    if let Some(wrong) = &found.counterexample {
        println!("VIOLATED after {} steps: {}", wrong.steps.len(), wrong.promise);
        for ((who, what), state) in &wrong.steps {
            println!("  {who} {what}\n      {state}");
        }
    }
    found.counterexample.is_some()
}

fn thousands(number: usize) -> String {
    let digits = number.to_string();
    let parts: Vec<_> =
        digits.as_bytes().rchunks(3).rev().map(|part| std::str::from_utf8(part).unwrap()).collect();
    parts.join(",")
}

/// Print the automata of what can be observed of an add, over a store without transactions and over
/// PostgreSQL.
fn traces(asked: &Asked) {
    let scenarios = [&log::traces::SINGLE, &log::traces::ATOMIC];
    for scenario in scenarios.into_iter().filter(|each| each.quick || !asked.quick) {
        let log = log::Log::new(scenario, asked.broken);
        let steps = |each: &_| log::traces::steps(&log, each);
        print_automaton(scenario.name, log::traces::LETTERS, Automaton::of(log::traces::first(&log), steps));
    }
    let fence = fence::Fence { cancels: 0, broken: asked.broken };
    let steps = |each: &_| fence::traces::steps(&fence, each);
    print_automaton("fence", fence::traces::LETTERS, Automaton::of(fence::traces::first(&fence), steps));
}

/// Print an automaton and its initial state: a line for each state, with the letters that may come
/// next and the states that they lead to.
fn print_automaton(name: &str, letters: &[(&str, &str)], (made, initial): (Automaton, u32)) {
    println!("{name}:");
    for edges in made.reached(initial) {
        let edges = edges.iter().map(|(letter, to)| format!("{} {to}", letters[*letter as usize].0));
        println!("{}", edges.collect::<Vec<_>>().join(" "));
    }
}
