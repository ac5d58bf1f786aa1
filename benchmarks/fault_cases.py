"""Which of our tests count for a row of the scoreboard, and as what: its title says no more than they try."""

from __future__ import annotations


def _tests(file: str, *names: str) -> tuple[str, ...]:
    return tuple(f"tests/{file}.py::{name}" for name in names)


# By row and case: tests, and classes of tests. Each of them puts to the test what the case is called; what works as it
# should beside it is not counted. A case of this name that the stock stack has is of the same files.
SUITES: dict[str, dict[str, tuple[str, ...]]] = {
    "11": {
        "flags, recipes and what they name": (
            *_tests(
                "test_bad_input",
                "test_flags_recipe_files_batch_token_and_checkpoint_are_told_together",
                "test_a_refused_run_reads_no_more_than_the_first_of_many_rows",
                "test_flags_for_speed_that_cannot_work_are_told_together",
                "test_names_of_modules_are_told_with_what_else_does_not_fit_the_model",
                "test_a_limit_of_tokens_below_the_longest_row_names_the_rows",
                "test_what_a_limit_of_tokens_leads_to_is_checked_too",
                "test_a_label_column_of_free_text_in_a_folder_that_holds_another_run",
                "test_when_a_run_saves_is_told_with_the_other_problems_and_before_any_token",
                "test_what_depends_on_model_or_labels_is_told_before_weights_are_read",
                "test_without_an_output_dir_the_message_stands_alone",
            ),
            *_tests(
                "test_bad_chats",
                "test_a_template_that_does_not_mark_the_answer_is_refused",
                "test_a_template_is_refused_before_many_rows_are_read",
                "test_a_tokenizer_without_a_template_is_refused_before_many_rows_are_read",
                "test_modules_trained_whole_beside_a_quantised_base_need_half_precision",
                "test_a_target_that_matches_nothing_is_told_with_the_names_that_exist",
                "test_a_target_that_matches_nothing_is_told_with_what_else_does_not_fit_the_model",
                "test_rows_longer_than_the_model_has_positions_are_refused",
                "test_a_row_whose_answer_is_cut_off_is_refused",
                "test_an_adapter_is_no_base",
                "test_options_of_adapters_without_an_adapter_are_refused",
                "test_every_problem_is_told_at_once",
            ),
        ),
        "launchers and their files": (
            *_tests("test_bad_input", "TestUnderLaunchers"),
            *_tests("test_bad_chats", "test_qlora_under_zero3_is_refused_before_anything_is_loaded"),
            *_tests("distributed/test_deepspeed_config", "test_a_contradiction_names_both_values"),
            *_tests("distributed/test_launch_check", "test_another_strategy_than_was_asked_for_is_refused"),
            *_tests(
                "distributed/test_launch",
                "test_several_processes_asked_for_and_one_started_is_refused",
                "test_plain_python_with_fsdp_is_refused_with_the_ways_to_start_it",
            ),
        ),
    },
    "12": {
        "good files": _tests("faults/test_bad_data", "test_a_file_is_read_exactly"),
        "bad files": _tests(
            "faults/test_bad_data",
            "test_a_file_is_refused",
            "test_a_bad_row_stops_the_run_or_is_left_out_and_written_down",
        ),
        "rows without a label": _tests("faults/test_bad_data", "test_a_row_without_a_label_is_a_bad_one"),
        "labels that are none of the run's": (
            *_tests("faults/test_bad_data", "test_a_label_that_is_none_of_the_runs_is_told"),
            *_tests("data/test_hub_json", "test_a_class_id_out_of_range_is_told_by_row_and_left_out"),
        ),
        "token ids beyond the embedding": (
            *_tests("faults/test_bad_data", "test_token_ids_beyond_the_embedding_are_told_before_the_first_step"),
            *_tests(
                "train/test_evaluate", "test_a_tokenizer_with_ids_beyond_the_embedding_is_told_without_a_traceback"
            ),
            *_tests("models/test_active_vocabulary", "TestUsedRows::test_a_token_that_the_model_has_not_is_refused"),
        ),
    },
    "14": {
        "a model": _tests(
            "faults/test_canaries",
            "TestAForeignModel::test_is_read_without_its_code_or_refused",
            "TestAForeignModel::test_ends_the_script_with_one_message",
            "TestAForeignModel::test_is_refused_by_prepare",
        ),
        "an adapter": _tests(
            "faults/test_canaries",
            "TestAFinishedModel::test_that_is_an_adapter_in_a_bin_is_refused",
            "TestAFinishedModel::test_that_is_an_adapter_in_a_bin_is_not_merged",
            "TestAFinishedModel::test_that_is_an_adapter_whose_configuration_reads_more_is_refused",
        ),
        "a recipe": _tests(
            "faults/test_canaries",
            "TestARecipe",
            "TestAFinishedModel::test_whose_own_recipe_trusts_its_code_does_not_run_it",
        ),
        "a dataset": _tests("faults/test_canaries", "TestADataset"),
        "a chat template": _tests("faults/test_canaries", "test_a_chat_template_cannot_leave_its_sandbox"),
        "a checkpoint": _tests(
            "faults/test_canaries",
            "TestACheckpoint::test_of_ones_own_that_was_changed_is_passed_over",
            "TestACheckpoint::test_that_others_could_write_is_refused",
            "TestACheckpoint::test_in_a_folder_that_others_could_write_is_refused",
            "TestACheckpoint::test_of_another_user_is_refused",
            "TestACheckpoint::test_from_elsewhere_is_refused",
            "TestACheckpoint::test_whose_best_one_others_could_write_is_refused",
            "test_a_checkpoint_in_parts_runs_its_code_only_where_it_is_trusted",
        ),
    },
    "15": {
        "by flag": _tests(
            "faults/test_tokens",
            "test_a_token_in_a_flag_is_refused_without_repeating_it",
            "test_the_token_that_is_set_here_is_known_whatever_its_form",
        ),
        "in a recipe or another file": _tests(
            "faults/test_tokens",
            "test_a_token_in_a_deepspeed_file_is_refused_without_repeating_it",
            "test_a_token_in_a_file_that_is_no_yaml_is_not_repeated",
            "test_tokens_in_flags_and_recipe_end_the_run_and_are_written_nowhere",
        ),
        "by environment, in runs that push": _tests(
            "faults/test_tokens",
            "test_a_push_sends_the_model_and_its_card_alone_and_the_token_is_nowhere_else",
            "test_a_push_that_fails_says_how_to_go_on_and_keeps_the_token",
        ),
    },
    "16": {
        "index of weights": _tests(
            "faults/test_hostile_names", "TestAnIndexOfWeights::test_that_names_a_file_elsewhere_is_refused"
        ),
        "tokenizer's settings": _tests("faults/test_hostile_names", "TestATokenizer"),
        "dataset's README": _tests(
            "faults/test_hostile_names", "TestADataset::test_that_names_files_elsewhere_is_refused"
        ),
        "links in a model": _tests(
            "faults/test_hostile_names", "TestLinksInAModel::test_that_lead_out_of_it_are_refused"
        ),
        "other names in files": _tests(
            "faults/test_hostile_names",
            "TestAManifest",
            "TestAState::test_has_its_best_checkpoint_in_the_run_wherever_it_says",
            "TestAState::test_that_names_no_checkpoint_has_none",
            "TestAState::test_whose_best_step_is_no_number_has_none",
            "TestADataset::test_on_the_hub_that_names_files_elsewhere_is_refused",
            "TestAnAdapter::test_whose_base_is_no_name_is_refused",
            "test_an_index_of_a_model_from_the_hub_that_names_a_file_elsewhere_is_told",
        ),
        "cards": (
            *_tests("faults/test_hostile_names", "test_a_language_is_no_markup_in_what_the_trainer_writes"),
            *_tests("faults/test_tokens", "test_a_card_says_what_is_so_and_takes_labels_and_languages_for_data"),
        ),
        "names that are typed": _tests(
            "faults/test_hostile_names",
            "test_a_built_in_name_is_one_of_the_list",
            "test_a_model_by_any_name_is_told_in_one_message",
        ),
        "other links": _tests(
            "faults/test_hostile_names",
            "TestAState::test_whose_best_checkpoint_is_a_link_is_refused",
            "TestLinks::test_out_of_an_adapter_are_not_copied_into_a_merged_model",
            "TestLinksInAModel::test_that_lead_to_templates_elsewhere_are_refused",
            "TestLinksInAModel::test_out_of_a_folder_that_is_named_like_the_hubs_cache_are_refused",
        ),
        "vocabularies that are links": _tests(
            "faults/test_hostile_names", "TestVocabularies::test_that_are_links_out_of_a_model_are_refused"
        ),
    },
}


def case_of(row: str, test: str) -> str:
    """The case of a row that counts a test, which is called `tests.faults.test_tokens.Class.test[values]`."""
    name = test.partition("[")[0]
    for title, tests in SUITES[row].items():
        dotted = [each.replace(".py::", ".").replace("::", ".").replace("/", ".") for each in tests]
        if any(f"{name}.".startswith(f"{each}.") for each in dotted):
            return title
    raise ValueError(f"row {row} has no case for {test}")
